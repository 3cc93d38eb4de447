"""The pytest plugin: invariants and kernels as fixtures, and observation of the caches that tests make.

Imports nothing of HKV until it is used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hkv.oracle.attach.attach import Session


@pytest.fixture(scope="session")
def hkv_run_watched() -> Callable[..., int]:
    """`hkv.testing.run_watched`: random traffic through an engine, every invariant asked after each operation."""
    from hkv.testing.watched import run_watched

    return run_watched


@pytest.fixture(scope="session")
def hkv_assert_writes_like() -> Callable[..., object]:
    """`hkv.testing.kernels.assert_writes_like`: a kernel held to the definition of its operation, byte for byte."""
    from hkv.testing.kernels import assert_writes_like

    return assert_writes_like


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that switches observation on."""
    parser.getgroup("hkv").addoption(
        "--hkv-attach",
        default="",
        metavar="FOLDER",
        help="record what the KV caches that tests make are asked and answer, one log each, into FOLDER; or settings"
        " as a JSON object (docs/checking-your-engine.md)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begins to observe, if that is asked for."""
    if text := config.getoption("--hkv-attach"):
        config.pluginmanager.register(_Observation(text), "hkv-observation")


class _Observation:
    """Observes the caches of each test, in logs that are named after it.

    Args:
      text: as `--hkv-attach`.
    """

    def __init__(self, text: str) -> None:
        from hkv.oracle.attach.attach import attach_all

        self._session: Session = attach_all(text)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._session.label = re.sub(r"[^A-Za-z0-9_.]+", "-", item.nodeid)[-120:].strip("-")
        try:
            return (yield)
        finally:
            self._session.close_all()

    def pytest_unconfigure(self) -> None:
        self._session.close()
