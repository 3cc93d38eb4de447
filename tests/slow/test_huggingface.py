"""Every field of every released file, taken away and changed: the layers that it governs change, or it is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from hkv.errors import HKVError
from hkv.model.huggingface import read_model
from tests.huggingface.test_closed_reading import RELEASED, check_change, places, put, without


def others(value: object) -> tuple[object, ...]:
    """Values to put in a value's place."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return value * 2, value + 1, max(value // 2, 1)
    return None, "strange", [], {}, 3


@pytest.mark.parametrize("name", sorted(RELEASED))
def test_every_field_of_a_released_file(name: str) -> None:
    config = RELEASED[name]
    before = read_model(config)
    for place in places(config):
        inner: Any = config
        for part in place:
            inner = inner[part]
        changed = [without(config, place), *(put(config, place, value) for value in others(inner))]
        for other in changed:
            with contextlib.suppress(HKVError):
                check_change(before, read_model(other), place, config)
