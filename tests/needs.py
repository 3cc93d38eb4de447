"""Needs of tests beyond the extra `test`, by the marker that says so: other packages, hardware, recordings.

A test with such a marker is skipped by name where its need is absent. `.ci/run` runs none of them; `.ci/peers` runs
those whose packages it can install, and lets none of these be skipped.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Need:
    """Something that is not there on every machine.

    Attributes:
      meaning: what a test with the marker does.
      is_absent: whether it is known to be missing here; what only the test can find out is False.
      remedy: what is missing and where to get it.
    """

    meaning: str
    is_absent: Callable[[], bool]
    remedy: str


def lacks(package: str) -> Callable[[], bool]:
    """Predicate: a package is not installed."""
    return lambda: importlib.util.find_spec(package) is None


def shared_folder() -> pathlib.Path:
    """Folder in which recordings are looked for that the project does not ship."""
    return pathlib.Path(os.environ.get("HKV_SHARED", ROOT.parent / "shared"))


def lacks_cuda_plugin() -> bool:
    """True if JAX has no plugin that compiles for NVIDIA's GPUs."""
    plugins = importlib.util.find_spec("jax_plugins") is not None
    return not plugins or not any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


def lacks_gpu() -> bool:
    """True if JAX computes on something else."""
    import jax

    return jax.default_backend() != "gpu"


def never() -> bool:
    """The test itself finds out."""
    return False


def peer(package: str, title: str, environment: str) -> Need:
    """A package that `.ci/peers` installs."""
    remedy = f"{title} is not installed: .ci/peers FOLDER --only {environment} makes an environment and runs this"
    return Need(f"is held against {title}", lacks(package), remedy)


def vllm(release: str, environment: str) -> Need:
    """A release of vLLM, which `.ci/peers` installs in an environment of its own."""

    def absent() -> bool:
        return lacks("vllm")() or not importlib.metadata.version("vllm").startswith(f"{release}.")

    return dataclasses.replace(peer("vllm", f"vLLM {release}", environment), is_absent=absent)


NEEDS: dict[str, Need] = {
    "torch": peer("torch", "PyTorch", "torch"),
    "triton": peer("triton", "Triton", "torch"),
    "jax_triton": peer("jax_triton", "jax-triton", "torch"),
    "vllm": vllm("0.33", "vllm"),
    "vllm_earlier": vllm("0.32", "vllm-0.32"),
    "ray": peer("ray", "Ray", "torch"),
    "lmcache": peer("lmcache", "LMCache 0.5.6", "lmcache"),
    "sglang": peer("sglang", "SGLang 0.5.23", "sglang"),
    "tokamax": peer("tokamax", "tokamax 0.0.17", "tokamax"),
    "browser": peer("playwright", "Chromium through Playwright", "page"),
    "cuda_plugin": Need(
        "compiles for an NVIDIA GPU, present or not",
        lacks_cuda_plugin,
        "no CUDA plugin of JAX is installed: .ci/peers FOLDER --only torch makes an environment and runs this",
    ),
    "gpu": Need("runs on a GPU", lacks_gpu, "JAX sees no GPU here"),
    "recordings": Need(
        "reads recordings that the project does not ship",
        lambda: not (shared_folder() / "oplogs").is_dir(),
        "no folder of shared recordings: set HKV_SHARED to one that has oplogs/, models/ and traces/",
    ),
    "python312": Need(
        "runs a Python 3.12 with JAX 0.11 or later",
        never,
        "no Python 3.12 with JAX 0.11, pytest and hypothesis: set HKV_PYTHON312 to one",
    ),
}


def register(config: pytest.Config) -> None:
    """Makes every need a marker of pytest's."""
    for name, need in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: {need.meaning}; skipped by name where it cannot")


def needs_of(item: pytest.Item) -> tuple[str, ...]:
    """The needs that a test is marked with, in the order of `NEEDS`."""
    marked = {mark.name for mark in item.iter_markers()}
    return tuple(name for name in NEEDS if name in marked)


def mark_recordings(items: list[pytest.Item]) -> None:
    """Marks tests by the fixture that hands them the shared folder."""
    for item in items:
        if "shared_dir" in getattr(item, "fixturenames", ()):
            item.add_marker("recordings")


def skip_if_absent(item: pytest.Item) -> None:
    """Skips a test, with the remedy, if something that it needs is known to be missing."""
    for name in needs_of(item):
        if NEEDS[name].is_absent():
            pytest.skip(NEEDS[name].remedy)
