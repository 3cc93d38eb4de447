"""Profiles, fixtures and the folder of shared recordings that some tests want."""

from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import HealthCheck, settings

from hkv.machine import native_loops
from tests import needs

ROOT = pathlib.Path(__file__).resolve().parent.parent

native_loops.enable()  # before any test uses JAX: programs compile in half the time, and run several times faster
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ.setdefault("HKV_COMPILATION_CACHE", "off")  # commands that tests run leave the user's folder alone

settings.register_profile(
    "hkv",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,  # as Hypothesis's own profile for CI: a landing does not hang on luck
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("hkv"), max_examples=2000)
settings.load_profile(os.environ.get("HKV_HYPOTHESIS_PROFILE", "hkv"))


def pytest_configure(config: pytest.Config) -> None:
    needs.register(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs.mark_recordings(items)  # first, so that `-m recordings` sees them


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    needs.skip_if_absent(item)


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """A folder with `oplogs/`, `models/` and `traces/`; tests that ask for it are skipped where there is none."""
    return needs.shared_folder()


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The project's own recordings."""
    return ROOT / "tests" / "data"
