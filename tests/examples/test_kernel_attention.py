"""JAX's paged-attention kernel reads the pages where they lie, and says what a gather says."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.hybrid_decoder import loop
from examples.hybrid_decoder.kernel_attention import attend_by_kernel, readable
from examples.hybrid_decoder.layers import attend
from examples.hybrid_decoder.model import Model
from examples.hybrid_decoder.serving import Decoder
from hkv.paged.operations import gather
from tests.pallas_kernels.programs import Program, lowered

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
MODEL = Model(layers=("full", "mla", "mla"), block=16)
LENGTHS = np.array([5, 70, 33], np.int32)


def pages(order: str):
    """A pool of random numbers, and a table of blocks in no order."""
    layouts = MODEL.layouts(24, order, None)
    size = 24 * MODEL.slots * layouts["full"].page_size // 4
    draw = np.random.default_rng(0)
    pool = jnp.asarray(draw.standard_normal(size).astype(np.float32).view(np.uint32))
    table = draw.permutation(np.arange(1, 24))[:15].reshape(3, 5).astype(np.int32)
    return layouts, pool, jnp.asarray(table), draw


@pytest.mark.parametrize(("kind", "order"), [("full", "LBHNC"), ("mla", "BLNHC")])
def test_the_kernel_says_what_a_gather_says(kind, order):
    layouts, pool, table, draw = pages(order)
    layout, layer = layouts[kind], jnp.int32(1 if kind == "mla" else 0)
    size = MODEL.head if kind == "full" else MODEL.latent
    query = jnp.asarray(draw.standard_normal((3, MODEL.heads, size)).astype(np.float32)) / 4
    found = attend_by_kernel(layout, pool, layer, query, table, LENGTHS, interpret=True)
    parts, _ = gather(pool, layout, layer, table.reshape(-1))
    parts = {name: part.reshape(3, -1, *part.shape[1:]) for name, part in parts.items()}
    key = parts.get("key", parts.get("latent"))
    value = parts.get("value", parts.get("latent"))
    read = jnp.arange(key.shape[1]) < LENGTHS[:, None, None]
    scale = 2.0 ** round(np.log2(size) / 2)
    wanted = attend(MODEL, query[:, None] * scale, key, value, read)[:, 0]
    np.testing.assert_allclose(found[..., -wanted.shape[-1] :], wanted, atol=2e-6)


def test_pages_that_the_kernel_cannot_read_are_told_apart():
    assert readable(pages("LBHNC")[0]["full"])
    assert readable(pages("BLHNC")[0]["full"])
    assert not readable(pages("LBNHC")[0]["full"]), "heads lie between the states of a block"
    assert readable(pages("LBNHC")[0]["mla"]), "one head"
    assert not readable(MODEL.layouts(24, "LBHNC", 8)["full"])


def test_the_whole_decode_loop_lowers_for_a_gpu_with_it():
    decoder = Decoder(dataclasses.replace(MODEL, layers=("full", "window", "mla")), 2, 24, chunk=8, order="LBHNC")
    run = functools.partial(loop.run, dataclasses.replace(decoder.plan, kernels=True), True)
    arguments = (decoder.parameters, decoder.weights, decoder.carry, jnp.asarray(False))
    text = lowered(Program(run, arguments, (), 0)).as_text()
    assert "paged_attention" in text


def test_it_lowers_for_a_gpu():
    layouts, pool, table, _ = pages("LBHNC")
    query = jax.ShapeDtypeStruct((3, MODEL.heads, MODEL.head), jnp.float32)

    def run(query, pool, table):
        return attend_by_kernel(layouts["full"], pool, jnp.int32(0), query, table, jnp.asarray(LENGTHS))

    text = lowered(Program(run, (query, pool, table), (), 0)).as_text()
    assert "paged_attention" in text
