"""Profiles, fixtures and the folder of shared recordings that some tests want."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from hkv.cli import keep_programs, progress
from hkv.errors import ConfigError
from hkv.machine import native_loops
from tests import needs, quick_compilation

ROOT = pathlib.Path(__file__).resolve().parent.parent

native_loops.enable()  # before any test uses JAX: programs compile in half the time, and run several times faster
# All workers, and all commands that tests run, share one folder of compiled programs, which leaves the user's alone.
# Small ones are kept too: tests compile a thousand, each in the time in which ten are read.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")
with contextlib.suppress(ConfigError):  # a checkout where others may write: everything is compiled anew
    keep_programs(os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(ROOT / ".jax_cache"))
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # as `.ci/peers`: vLLM looks once for what it runs on, at any import
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; commands under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
progress.SECONDS = 3600.0  # what a slow machine takes is no message
OPTIMIZED = ROOT / "tests" / "slow" / "optimized"
PROFILE = os.environ.get("HKV_HYPOTHESIS_PROFILE", "hkv")
"""Every run draws the same examples under `hkv` and `thorough`, other ones each time under `campaign`."""

settings.register_profile(
    "hkv",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("hkv"), max_examples=2000)
# An edit is noticed by the first example that fails (`benchmarks/mutation.py`): nobody reads it.
unshrunk = {"phases": (Phase.explicit, Phase.generate), "report_multiple_bugs": False}
settings.register_profile("judge", settings.get_profile("hkv"), **unshrunk)
settings.register_profile("campaign", settings.get_profile("thorough"), derandomize=False)
settings.load_profile(PROFILE)

# Hypothesis likes to draw constants that stand in the modules loaded so far: a test would see other examples alone than
# after others in its process, or on one of several workers. Releases before 6.131 do not; `tests/test_deterministic.py`
# notices where this is not enough.
if hasattr(providers, "Constants"):
    NO_CONSTANTS = providers.Constants()
    providers._get_local_constants = lambda: NO_CONSTANTS


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Registers markers, and chooses the seed of a campaign, so that it can be named; workers get the controller's."""
    if not settings.default.derandomize and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(secrets.randbelow(1 << 32))
    needs.register(config)
    if not all(OPTIMIZED in (path := _path(config, name), *path.parents) for name in config.args):
        quick_compilation.enable()  # what runs once or twice is not worth optimising


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keeps tests together that share programs, unless `--dist` asks for something else."""
    if config.getoption("dist") != "load":
        return None
    from tests.scheduling import ProgramScheduling

    return ProgramScheduling(config, log)


def _path(config: pytest.Config, name: str) -> pathlib.Path:
    """The file or folder that an argument of the command line names."""
    return (config.invocation_params.dir / name.partition("::")[0]).resolve()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how to repeat what a campaign found."""
    seed = config.getoption("hypothesis_seed", None)
    if seed is None:
        return
    failed = [report.nodeid for report in terminalreporter.getreports("failed")]
    command = f"HKV_HYPOTHESIS_PROFILE={PROFILE} python -m pytest --hypothesis-seed={seed}"
    terminalreporter.write_line(f"to repeat these examples: {command}")
    for name in failed:
        terminalreporter.write_line(f"to repeat a failure: {command} '{name}'")


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
