"""Whole programs of the data plane for an NVIDIA H200, lowered without one: every operation, layout and dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hkv import paged
from hkv.chunks.formats import TRAITS, EngineKVFormat, num_tensors
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.chunks.transfer import Transfer, pack_groups, unpack_groups
from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import quantize
from hkv.layout.views.numpy import numpy_dtype
from hkv.spec import FullAttention, MLAAttention

KERNELS = ("auto", "pallas_triton")
"""Implementations that move runs of any size: bulk copies where possible, registers elsewhere, or registers alone."""

GPU = "NVIDIA H200"
DTYPES = ("float16", "float32", "int8", "float8_e4m3fn", "uint8")


class Program(NamedTuple):
    """A function, its arguments as shapes, and the buffers that it may change in place, by their bytes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    pool_bytes: int


def attention(order: str, dtype: str) -> Layout:
    return Layout.of_spec(
        FullAttention(block_size=16, num_kv_heads=2, head_size=64, dtype=dtype), order, num_blocks=64, num_layers=2
    )


LAYOUTS = {
    **{order.value: attention(order.value, "bfloat16") for order in Order},
    **{dtype: attention("LBNHC", dtype) for dtype in DTYPES},
    "latent of 576": Layout.of_spec(MLAAttention(block_size=64, head_size=576), "LBNHC", num_blocks=16),
    "656 bytes": Layout.of_spec(
        quantize(MLAAttention(block_size=64, head_size=576), "fp8_ds_mla"), "LBNHC", num_blocks=16
    ),
    "132 bytes": Layout.of_spec(
        quantize(MLAAttention(block_size=64, head_size=128, dtype="uint8"), "fp8_indexer"), "LBNHC", num_blocks=16
    ),
}


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def values_of(layout: Layout, count: int) -> dict[str, jax.ShapeDtypeStruct]:
    heads = {part.name: layout.shape[2] if part.heads is None else part.heads for part in layout.content}
    return {
        part.name: jax.ShapeDtypeStruct((count, heads[part.name], *part.shape), numpy_dtype(part.dtype))
        for part in layout.content
    }


Operation = Callable[..., Any]

OPERATIONS: dict[str, Operation] = {
    "write": lambda layout, kernel, pool, ids, tokens, blocks: paged.write(
        pool, layout, jnp.int32(0), ids, ids, tokens, implementation=kernel
    ),
    "scatter": lambda layout, kernel, pool, ids, tokens, blocks: paged.scatter(
        pool, layout, jnp.int32(0), ids, blocks, implementation=kernel
    ),
    "copy_blocks": lambda layout, kernel, pool, ids, tokens, blocks: paged.copy_blocks(
        pool, layout, ids, ids + 4, implementation=kernel
    ),
    "zero_blocks": lambda layout, kernel, pool, ids, tokens, blocks: paged.zero_blocks(
        pool, layout, ids, implementation=kernel
    ),
    "gather": lambda layout, kernel, pool, ids, tokens, blocks: (
        pool,
        paged.gather(pool, layout, jnp.int32(0), ids, implementation=kernel),
    ),
}


def _in_turn(layout: Layout, kernel: str, names: tuple[str, ...], pool: Any, *rest: Any) -> Any:
    """Operations one after the other, the pool handed from each to the next."""
    found = None
    for name in names:
        pool, found = OPERATIONS[name](layout, kernel, pool, *rest)
    return pool, found


def paged_program(layout: Layout, kernel: str, *names: str) -> Program:
    size = -(-layout.end // 128) * 128
    arguments = (
        jax.ShapeDtypeStruct((size,), np.uint8),
        int32(4),
        values_of(layout, 4),
        values_of(layout, 4 * layout.states_per_block),
    )
    return Program(functools.partial(_in_turn, layout, kernel, names), arguments, (0,), size)


def geometry(fmt: int, layers: int, slots: int, heads: int, size: int, dtype: str, stride: int = 0) -> PageGeometry:
    found = EngineKVFormat(fmt)
    return PageGeometry(found, TRAITS[found].kv_size, layers, 16, slots, heads, size, dtype, stride)


GROUPS = {
    "one tensor of all layers": [geometry(0, 3, 16, 2, 64, "bfloat16")],
    "K and V apart in each layer": [geometry(2, 3, 16, 2, 64, "bfloat16")],
    "a list of K and a list of V": [geometry(9, 3, 16, 2, 64, "bfloat16")],
    "heads first, blocks padded": [geometry(12, 2, 16, 2, 64, "bfloat16", 4096)],
    "latents and indexer": [geometry(3, 2, 64, 1, 576, "bfloat16"), geometry(14, 2, 64, 1, 132, "uint8")],
    "two groups of one shape": [geometry(13, 2, 16, 2, 64, "bfloat16"), geometry(13, 2, 16, 2, 64, "float16")],
}
"""Kernel groups that are packed and unpacked together."""


def _transfers(geometries: list[PageGeometry]) -> Iterator[Transfer]:
    offset = 0
    for group, found in enumerate(geometries):
        rows = 2 * found.slots
        nbytes = found.kv_size * found.num_layers * rows * found.row_bytes
        shape = (found.kv_size, found.num_layers, rows, found.num_heads * found.head_size)
        yield Transfer(found, Region(group, offset, rows, shape, found.dtype, nbytes))
        offset += nbytes


def _pack(transfers: Any, kernel: str, tensors: Any, objects: Any, ids: Any, skips: Any) -> Any:
    return pack_groups(transfers, tensors, objects, ids, skips, kernel)


def _unpack(transfers: Any, kernel: str, tensors: Any, objects: Any, ids: Any, skips: Any) -> Any:
    return unpack_groups(transfers, tensors, objects, ids, skips, kernel)


def chunk_program(geometries: list[PageGeometry], kernel: str, direction: str) -> Program:
    transfers = tuple(_transfers(geometries))
    last = transfers[-1].region
    tensors = tuple(
        tuple(
            jax.ShapeDtypeStruct((g.pages_per_tensor, g.page_stride_bytes), np.uint8)
            for _ in range(num_tensors(TRAITS[g.format].structure, g.num_layers))
        )
        for g in geometries
    )
    objects = jax.ShapeDtypeStruct((2, last.offset + last.nbytes), np.uint8)
    arguments = (tensors, objects, tuple(int32(4) for _ in geometries), tuple(int32() for _ in geometries))
    sizes = [g.pages_per_tensor * g.page_stride_bytes for g in geometries]
    if direction == "pack":
        return Program(functools.partial(_pack, transfers, kernel), arguments, (1,), 2 * objects.shape[1])
    return Program(functools.partial(_unpack, transfers, kernel), arguments, (0,), min(sizes))


def gpu_mesh() -> jax.sharding.AbstractMesh:
    """Mesh that kernels are lowered for where there is no GPU."""
    device = jax.sharding.AbstractDevice(GPU, None, "gpu")
    return jax.sharding.AbstractMesh((), (), abstract_device=device)


def lowered(program: Program, sharding: Any = None) -> Any:
    """The program for CUDA, its arguments on the device of a sharding if one is given."""
    arguments = program.arguments
    if sharding is not None:
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(gpu_mesh()):
        traced = jax.jit(program.function, donate_argnums=program.donated).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",))
