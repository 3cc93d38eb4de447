"""Programs over a served cache are exported, written, read and called, as `jax.export` does with plain arrays."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import hkv
from hkv import serving
from hkv.block_tables import rows as block_rows
from tests.serving.test_serving import BUDGET, DATA, LONGEST, WIDTH, R, config


def turn(served: serving.Serving, history: jax.Array, known: jax.Array, arrived: jax.Array):
    """Everything that a turn makes, of each of the types that a server handles."""
    served, found = serving.arrive(served, jnp.arange(R), history, known)
    plan = serving.schedule(served, history, known, arrived, budget=BUDGET)
    served, step = serving.step(served, plan.tokens, plan.cu_q_lens, plan.rows)
    content = jnp.ones((BUDGET, 1, WIDTH), jnp.float32)
    served = serving.write(served, "near", step, {"key": content, "value": content})
    return (
        served,
        found,
        plan,
        step,
        serving.ragged(served, step, "near"),
        serving.attend(served, "near", step, content),
    )


def test_a_turn_is_written_and_read():
    history = np.random.default_rng(0).integers(0, 9, (R, LONGEST)).astype(np.int32)
    given = serving.from_config(config(), rows=R), history, np.int32([7, 5, 9]), np.int32([1, 2, 3])
    text = jax.export.export(jax.jit(turn))(*given).serialize()
    exported = jax.export.deserialize(text)
    assert exported.in_tree == jax.tree.structure((given, {}))
    found, wanted = exported.call(*given), turn(*given)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@functools.cache
def values():
    """A value of every pytree that callers handle, planned layers with their fractions and parts among them."""
    served = serving.from_config(config(), rows=R, debug=True)
    served, turned = serving.step(served, np.zeros(4, np.int32), np.array([0, 4]))
    _, allocated = hkv.allocate(serving.from_config(config(), rows=R).cache, 0, np.arange(5))
    model = hkv.read_model(DATA / "models" / "gemma3n_text.json")  # layers that read other layers' caches
    planned = serving.from_plan(hkv.plan(model, "16MiB", max_model_len=64), rows=1)
    return {
        "in debug mode": served,
        "a turn": turned,
        "of one row": allocated,
        "a hit": hkv.longest_hit(served.cache, np.arange(5)),
        "planned": planned,
        "block tables": block_rows.init_rows(2, 4),
    }


@pytest.mark.parametrize("name", ["in debug mode", "a turn", "of one row", "a hit", "planned", "block tables"])
def test_every_pytree_goes_through(name):
    value = values()[name]
    text = jax.export.export(jax.jit(lambda given: given))(value).serialize()
    assert jax.export.deserialize(text).in_tree == jax.tree.structure(((value,), {}))
