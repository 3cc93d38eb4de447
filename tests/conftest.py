"""Profiles, fixtures and the folder of shared recordings that some tests want."""

from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import HealthCheck, settings

ROOT = pathlib.Path(__file__).resolve().parent.parent

settings.register_profile(
    "hkv",
    deadline=None,
    print_blob=True,
    derandomize="CI" in os.environ,  # as Hypothesis's own profile for CI: a landing does not hang on luck
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("hkv"), max_examples=2000)
settings.load_profile(os.environ.get("HKV_HYPOTHESIS_PROFILE", "hkv"))


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """A folder with `oplogs/`, `models/` and `traces/`; skips the test where there is none."""
    folder = pathlib.Path(os.environ.get("HKV_SHARED", ROOT.parent / "shared"))
    if not (folder / "oplogs").is_dir():
        pytest.skip("no folder of shared recordings: set HKV_SHARED to one that has oplogs/, models/ and traces/")
    return folder


@pytest.fixture(scope="session")
def data_dir() -> pathlib.Path:
    """The project's own recordings."""
    return ROOT / "tests" / "data"
