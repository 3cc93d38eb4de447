"""vLLM 0.33's own tests, out of its source distribution (47 MB), and what they import besides the environment of the
peer `vllm`.

pip asks a source distribution for its metadata before it gives it away, which takes vLLM's build requirements; they
and the tests' imports lie in a folder of their own, so that the environment stays as it is. `HKV_VLLM_TESTS` names a
folder `tests` that is there already.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tarfile

from peer_environments import PeerError

RELEASE = "0.33.0"
VARIABLE = "HKV_VLLM_TESTS"
PACKAGES = (
    "setuptools-rust",
    "semantic_version",
    "setuptools-scm",
    "vcs-versioning",
    "wheel",
    "tblib",
    "msgpack",
    "orjson",
)
"""Packages that vLLM's metadata are made with, and that its tests import."""

MODELS = pathlib.Path(__file__).resolve().parent / "peers" / "models"
"""Configurations of the models that the tests of `SAMPLE` name: no weights."""

_UNIT = "tests/v1/kv_connector/unit"
SAMPLE = (
    *("tests/v1/core/test_prefix_caching.py", "tests/v1/core/test_async_scheduler.py"),
    *(f"{_UNIT}/test_{name}.py" for name in ("cache_pollution_prevention", "decode_bench_connector")),
    *(f"{_UNIT}/test_{name}.py" for name in ("error_propagation", "invalid_blocks_correctness")),
    *(f"{_UNIT}/test_{name}.py" for name in ("kv_load_failure_recovery", "scheduler_kv_connector_override")),
    *(f"{_UNIT}/test_remote_{name}_lifecycle.py" for name in ("decode", "prefill")),
)
"""Tests that make cache managers and need neither a GPU, nor weights, nor a network.

With the checks of their logs they take four minutes of processor time."""


def fetch(python: pathlib.Path, folder: pathlib.Path, timeout: float | None = None) -> pathlib.Path:
    """The folder `tests`, downloaded and unpacked below `folder` unless it is there or `HKV_VLLM_TESTS` names one.

    Args:
      python: of the environment of the peer `vllm`, whose torch the metadata need.
      folder: of the tests alone; what they import is in `folder / "packages"` afterwards.
      timeout: seconds that each step may take at most, or None.

    Raises:
      PeerError: the variable names another folder, or pip cannot have the distribution.
    """
    named = os.environ.get(VARIABLE)
    if named and not pathlib.Path(named, "v1").is_dir():
        raise PeerError(f"{VARIABLE} = {named!r}: expected the folder tests of vLLM's source distribution")
    packages, tests = folder / "packages", folder / f"vllm-{RELEASE}" / "tests"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    if not packages.is_dir():
        made = packages.with_suffix(".part")
        shutil.rmtree(made, ignore_errors=True)
        _run([*pip, "install", "-q", "--no-deps", "--target", str(made), *PACKAGES], {}, timeout)
        made.rename(packages)
    if named:
        return pathlib.Path(named).resolve()
    if not tests.is_dir():
        build = {"PYTHONPATH": str(packages), "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": RELEASE}
        options = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation", "-d", str(folder)]
        _run([*pip, "download", "-q", *options, f"vllm=={RELEASE}"], build, timeout)
        with tarfile.open(folder / f"vllm-{RELEASE}.tar.gz") as archive:
            wanted = (member for member in archive if member.name.startswith(f"vllm-{RELEASE}/tests/"))
            archive.extractall(folder / "part", wanted, filter="data")
        (folder / "part" / tests.parent.name).rename(tests.parent)
        (folder / "part").rmdir()
    return tests


def _run(command: list[str], variables: dict[str, str], timeout: float | None) -> None:
    try:
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"vLLM's own tests: {error}") from error
    if done.returncode:
        raise PeerError(f"vLLM's own tests: {done.stderr.strip().splitlines()[-1]} ({VARIABLE} may name a folder)")
