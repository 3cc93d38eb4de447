"""The compiled target of ARC against Python's doubles."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hkv.dialects.vllm.rules.offload import arc


class Nothing:
    """A workspace without arrays."""

    def present(self, names: Any) -> tuple[str, ...]:
        return ()

    def only(self, names: Any, values: Any) -> Nothing:
        return self

    def replace(self, **changes: Any) -> Nothing:
        return self


@jax.jit
def moved(target: Any, a: Any, b: Any, up: Any, most: Any) -> Any:
    _, step = arc.quotient(Nothing(), a, b, jnp.bool_(True))
    chosen = zip(arc.added(arc.Real(*target), step, most), arc.less(arc.Real(*target), step), strict=True)
    return jnp.stack([jnp.where(up, more, fewer) for more, fewer in chosen])


def real(value: float) -> list[int]:
    """A double's words; it must be a multiple of the last bit."""
    scaled = value * 2**52
    assert scaled == int(scaled)
    whole = int(scaled)
    return [whole >> 52, (whole >> 26) & arc.LOW, whole & arc.LOW]


@pytest.mark.parametrize("size", [7, 100, 5_000, 10_000_000])
def test_the_target_is_a_double(size: int) -> None:
    draw, target, words = random.Random(size), 0.0, jnp.zeros(3, jnp.int32)
    for _ in range(400):
        gone = draw.randrange(1, draw.choice((3, 30, size + 1))), draw.randrange(1, size + 1)
        a, b = draw.sample(gone, 2)
        up, step = draw.random() < 0.5, max(1, a / b)
        target = min(target + step, size) if up else max(target - step, 0)
        words = moved(words, a, b, up, size)
        assert words.tolist() == real(target)
