"""No array of a state is copied: not in `run`, not in a verb, not when states are stacked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hkv.dialects.vllm import machine as cache
from tests.cache.build import BUCKETS, LARGE, config, large_copies, program

VERBS = tuple(code.name.lower() for code in cache.ALL)


def test_run_copies_no_array() -> None:
    assert large_copies(program().as_text(), LARGE) == []


def test_stacked_run_copies_no_array() -> None:
    assert large_copies(program(3).as_text(), LARGE) == []


@pytest.mark.parametrize("name", VERBS)
def test_verbs_copy_no_array(name: str) -> None:
    parameters, state = cache.init(config(), BUCKETS)
    verb = getattr(cache, name).jitted
    text = verb.lower(parameters, state, np.int32(0), np.zeros(4, np.int32)).compile().as_text()
    assert large_copies(text, LARGE) == []


def test_a_copy_would_be_found() -> None:
    """A value that is read before a write and used after it makes XLA keep both arrays."""

    def careless(array, places):
        def body(carry):
            array, place, total = carry
            value = array[place % array.shape[0]]
            array = array.at[(place + value) % array.shape[0]].add(1)
            return array, place + 1, total + value + array[value % array.shape[0]]

        return lax.while_loop(lambda carry: carry[1] < places, body, (array, 0, 0))

    text = jax.jit(careless, donate_argnums=(0,)).lower(jnp.zeros(LARGE, jnp.int32), 5).compile().as_text()
    assert large_copies(text, LARGE)
