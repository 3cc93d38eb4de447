"""Layers as data: one compiled body for all of them, and the bytes and tokens of the unrolled program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import hkv
from hkv import serving
from hkv.errors import OperationError
from hkv.model.topology import Group
from tests.cache.build import large_copies

WIDTH, TOKENS = 8, 9


def config(layers: int = 6) -> hkv.VllmConfig:
    """Two windows for each layer of full attention, two recurrent layers, and pages of another size."""
    sizes = {"block_size": 4, "num_kv_heads": 1, "head_size": WIDTH, "dtype": "float32"}
    specs = {
        "full": hkv.FullAttention(**sizes),
        "near": hkv.SlidingWindow(**sizes, window=6),
        "state": hkv.Mamba(block_size=4, shapes=((WIDTH,),), dtypes=("float32",)),
        "wide": hkv.FullAttention(**{**sizes, "head_size": 2 * WIDTH}),
    }
    named = {"near": [n for n in range(layers) if n % 3], "full": range(0, layers, 3), "state": [90, 91], "wide": [99]}
    groups = (Group(tag=tag, spec=specs[tag], layers=tuple(map(str, named[tag]))) for tag in named)
    return hkv.cache_config(hkv.Topology(groups=tuple(groups)), 30, max_model_len=32)


def begun(*, debug: bool = False, layers: int = 6):
    served = serving.from_config(config(layers), rows=2, debug=debug)
    prompts = np.arange(2 * 32, dtype=np.int32).reshape(2, 32)
    served, _ = serving.arrive(served, np.array([0, 1]), prompts, np.array([5, 4]))
    tokens = np.concatenate([prompts[0, :5], prompts[1, :4]])
    return serving.step(served, tokens, np.array([0, 5, 9]))


def weights(layers: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(layers, 3, WIDTH, WIDTH)) / WIDTH, jnp.float32)


def attention_layer(served, turn, x, layer, weight):
    q, k, v = (x @ part for part in weight)
    served = serving.write(served, layer, turn, {"key": k[:, None], "value": v[:, None]})
    return served, x + serving.attend(served, layer, turn, q[:, None])[:, 0]


def recurrent_layer(served, turn, x, layer):
    before = serving.read_state(served, layer, turn)["state0"]
    after = before + jnp.arange(2.0)[:, None] + x[0]
    return serving.write_state(served, layer, turn, {"state0": after}), x + after[0]


def unrolled(served, turn, x, layers: int):
    for number, weight in enumerate(weights(layers)):
        served, x = attention_layer(served, turn, x, str(number), weight)
    for name in ("90", "91"):
        served, x = recurrent_layer(served, turn, x, name)
    return served, x


def scanned(served, turn, x, layers: int):
    def body(carry, each):
        return attention_layer(carry[0], turn, carry[1], *each), None

    stack = served.stack([str(number) for number in range(layers)])
    carry, _ = lax.scan(body, (served, x), (stack, weights(layers)))
    carry, _ = lax.scan(
        lambda c, layer: (recurrent_layer(c[0], turn, c[1], layer), None), carry, served.stack(["90", "91"])
    )
    return carry


X = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, WIDTH)), jnp.float32)


@pytest.mark.parametrize("debug", [False, True])
def test_a_scan_over_layers_is_the_unrolled_program(debug):
    """Windows and full attention in one body, groups and all; marks are those that names leave."""
    served, turn = begun(debug=debug)
    results = []
    for way in (unrolled, scanned):
        error, found = jax.jit(checkify.checkify(functools.partial(way, layers=6)))(served, turn, X)
        error.throw()
        results.append(found)
    jax.tree.map(np.testing.assert_array_equal, results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_debug_mode_finds_what_was_not_written():
    served, turn = begun(debug=True)
    names = [str(number) for number in range(6)]

    def body(served, layer):
        return served, serving.attend(served, layer, turn, X[:, None])

    checked = checkify.checkify(lambda served: lax.scan(body, served, served.stack(names)))
    error, _ = jax.jit(checked)(served)
    assert "attend: layer 'one of 0, 1, 2, 3, 4, 5': token 0 of query 0 was never written" in error.get()


def test_the_program_does_not_grow_with_layers_and_copies_no_pool():
    lines = []
    for layers in (6, 12):
        served, turn = begun(layers=layers)
        lowered = jax.jit(functools.partial(scanned, layers=layers), donate_argnums=0).lower(served, turn, X)
        lines.append(len(lowered.as_text().splitlines()))
        copied = large_copies(lowered.compile().as_text(), served.pool.size)
        assert [line for line in copied if " scatter(" not in line] == []
    assert lines[0] == lines[1]


def test_layers_that_do_not_agree_are_no_stack():
    served, turn = begun()
    for names, layer in ((["0", "99"], "99"), (["0", "90"], "90")):
        with pytest.raises(OperationError, match=f"layers = '{layer}': expected pages and chunks as those of"):
            served.stack(names)
    with pytest.raises(OperationError, match="at least one layer"):
        served.stack([])
    with pytest.raises(OperationError, match="expected one of them, as lax"):
        serving.attend(served, served.stack(["0", "1"]), turn, X[:, None])
    one = jax.tree.map(lambda field: field[0], served.stack(["90"]))
    with pytest.raises(OperationError, match="a layer of tokens"):
        serving.attend(served, one, turn, X[:, None])
