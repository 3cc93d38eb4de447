"""A derivative through a pool of bits is refused by name, never silently 0; what goes round the pool has its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hkv import paged
from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.views import jax as jax_views
from hkv.paged.step import quantize_per_tensor, quantize_per_token_head
from hkv.spec import FullAttention

LAYOUT = Layout.of_spec(
    FullAttention(block_size=4, num_kv_heads=2, head_size=4, dtype="float32"), "LBNHC", num_blocks=3
)
TABLE = np.int32([2, 1])
BLOCKS, STATES = np.int32([2, 2, 1]), np.int32([0, 3, 1])
PLACES = np.int32([0, 3, 5])
"""Indices of the three tokens among the eight of the table."""


def pool():
    return np.zeros(LAYOUT.end, np.uint8)


def tokens(seed):
    return np.random.default_rng(seed).normal(size=(3, 2, 4)).astype(np.float32)


def through_the_pool(keys, values):
    """Keys and values as a reader of the pages finds them: `[8, 2, 4]` each."""
    written, _ = paged.write(pool(), LAYOUT, np.int32(0), BLOCKS, STATES, {"key": keys, "value": values})
    found, _ = paged.gather(written, LAYOUT, np.int32(0), TABLE)
    return found["key"], found["value"]


def dense(keys, values):
    """The same without pages."""
    empty = jnp.zeros((8, 2, 4), jnp.float32)
    return empty.at[PLACES].set(keys), empty.at[PLACES].set(values)


def attention(read, query, keys, values):
    keys, values = read(keys, values)
    return jnp.sum(jax.nn.softmax(jnp.einsum("hd,nhd->hn", query, keys)) * jnp.sum(values, axis=-1).T)


REFUSED = r"values\['key'\] = 'float32\[3, 2, 4\], differentiated': expected no derivative.*stop_gradient"


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_gradient_through_a_write_is_refused(transform):
    function = transform(lambda keys: attention(through_the_pool, np.ones((2, 4), np.float32), keys, tokens(1)))
    assert has_a_gradient_without_pages()
    with pytest.raises(LayoutError, match=REFUSED):
        jax.grad(function)(tokens(0))
    with pytest.raises(LayoutError, match=REFUSED):
        jax.jvp(function, (tokens(0),), (tokens(2),))


@functools.cache
def has_a_gradient_without_pages():
    loss = jax.jit(jax.grad(lambda keys: attention(dense, np.ones((2, 4), np.float32), keys, tokens(1))))
    return bool(np.any(np.asarray(loss(tokens(0)))))


def test_a_gradient_through_a_write_in_a_scan_is_refused():
    def step(buffer, keys):
        return paged.write(buffer, LAYOUT, np.int32(0), BLOCKS, STATES, {"key": keys})[0], jnp.sum(keys)

    def loss(keys):
        return jnp.sum(jax.lax.scan(step, pool(), jnp.stack([keys, keys]))[1])

    with pytest.raises(LayoutError, match=REFUSED):
        jax.grad(loss)(tokens(0))


def test_the_gradient_round_the_pool_is_that_without_pages():
    query = tokens(3)[0]
    found, expected = (
        jax.jit(jax.grad(lambda query, read=read: attention(read, query, tokens(0), tokens(1))))(query)
        for read in (through_the_pool, dense)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert np.any(np.asarray(found))


def test_values_that_are_made_constants_are_written():
    def loss(read, keys):
        return attention(read, keys[0], *map(jax.lax.stop_gradient, (keys, tokens(1)))) + jnp.sum(keys**2)

    found, expected = (
        jax.grad(lambda keys, read=read: loss(read, keys))(tokens(0)) for read in (through_the_pool, dense)
    )
    assert np.array_equal(found, expected)


def test_a_gradient_through_whole_blocks_is_refused():
    def loss(keys):
        return jnp.sum(paged.scatter(pool(), LAYOUT, np.int32(0), TABLE, {"key": keys})[0].astype(jnp.float32))

    with pytest.raises(LayoutError, match=r"values\['key'\]"):
        jax.grad(loss)(np.ones((8, 2, 4), np.float32))


def test_a_gradient_through_a_view_is_refused():
    view = LAYOUT.part_view("key", 0)

    def loss(blocks):
        return jnp.sum(jax_views.read(jax_views.write(pool(), view, blocks), view))

    with pytest.raises(LayoutError, match=r"values = .* expected no derivative"):
        jax.grad(loss)(np.ones(view.shape, np.float32))


@pytest.mark.parametrize(
    "quantize",
    [lambda x: quantize_per_tensor(x, jnp.float32(0.5), "int8"), lambda x: quantize_per_token_head(x, "int8")[0]],
)
def test_a_gradient_through_integers_is_refused(quantize):
    with pytest.raises(LayoutError, match=r"values = .* expected no derivative"):
        jax.grad(lambda x: jnp.sum(quantize(x).astype(jnp.float32)))(tokens(0))


def test_a_float8_value_has_a_derivative_until_it_is_written():
    def loss(x):
        return jnp.sum(quantize_per_tensor(x, jnp.float32(0.5), "float8_e4m3fn").astype(jnp.float32))

    assert np.array_equal(jax.jit(jax.grad(loss))(tokens(0)), np.full((3, 2, 4), 2, np.float32))
