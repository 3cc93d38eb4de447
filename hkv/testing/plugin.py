"""The pytest plugin: a fixture that runs an engine under every invariant. Imports nothing of HKV until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def hkv_run_watched() -> Callable[..., int]:
    """`hkv.testing.run_watched`: random traffic through an engine, every invariant asked after each operation."""
    from hkv.testing.watched import run_watched

    return run_watched
