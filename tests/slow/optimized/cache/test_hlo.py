"""No array of a state is copied: not in `run`, whatever it knows, not when states are stacked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.rules.operations import Batch, Code
from tests.cache.build import BUCKETS, LARGE, config, large_copies, program


def test_run_copies_no_array() -> None:
    assert large_copies(program().as_text(), LARGE) == []


def test_stacked_run_copies_no_array() -> None:
    assert large_copies(program(3).as_text(), LARGE) == []


@pytest.mark.parametrize("code", cache.ALL, ids=lambda code: code.name.lower())
def test_programs_of_one_operation_copy_no_array(code: Code) -> None:
    parameters, state = cache.init(config(), BUCKETS)
    program = jax.jit(cache.pure(only=(code,)), donate_argnums=1)
    text = program.lower(parameters, state, Batch().add(code).build()).compile().as_text()
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
