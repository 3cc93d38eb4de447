"""Fixtures of the compiled cache's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hkv.dialects.vllm import machine as cache


@pytest.fixture
def _fresh_programs() -> Iterator[None]:
    """No program is kept from before the test, nor for what comes after it: the rules are changed in between."""
    cache.forget_programs()
    yield
    cache.forget_programs()
