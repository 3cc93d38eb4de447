"""These tests compile as users do, which a process does for all of its programs or for none."""

from __future__ import annotations

import pytest

from tests import quick_compilation


@pytest.fixture(autouse=True, scope="package")
def optimized() -> None:
    """Skips where programs are compiled in the least time, as they are for all other tests."""
    if quick_compilation.is_enabled():
        pytest.skip("compiled as users do: pytest tests/slow/optimized, by itself")
