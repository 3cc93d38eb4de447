"""Programs of the gate: every operation, layout, dtype and implementation, with the bytes that it has to move."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv import paged
from hkv.layout.block_layout import Layout, Order
from hkv.layout.content import quantize
from hkv.layout.views.numpy import numpy_dtype
from hkv.spec import FullAttention, MLAAttention
from tests.pallas_kernels import programs

IMPLEMENTATIONS = ("xla", "mosaic", "pallas_triton", "triton")
COUNT = 16
"""Blocks, or tokens, that a program moves."""

LAYERS = 2
DTYPES = ("float32", "int8", "float8_e4m3fn")


def attention(order: str, dtype: str = "bfloat16") -> Layout:
    """Eight heads of 128 in blocks of 16: tokens of 4 KiB and blocks of 64 KiB in bfloat16."""
    spec = FullAttention(block_size=16, num_kv_heads=8, head_size=128, dtype=dtype)
    return Layout.of_spec(spec, order, num_blocks=64, num_layers=LAYERS)


def latent(spec: MLAAttention) -> Layout:
    """Latents in blocks of 64."""
    return Layout.of_spec(spec, "LBNHC", num_blocks=64, num_layers=LAYERS)


LAYOUTS = {
    **{order.value: attention(order.value) for order in Order},
    **{dtype: attention("LBNHC", dtype) for dtype in DTYPES},
    "latent of 576": latent(MLAAttention(block_size=64, head_size=576)),
    "656 bytes": latent(quantize(MLAAttention(block_size=64, head_size=576), "fp8_ds_mla")),
    "132 bytes": latent(quantize(MLAAttention(block_size=64, head_size=128, dtype="uint8"), "fp8_indexer")),
}

POOLS = {
    "LBNHC": ("uint8", "uint32", "bfloat16", "float8_e4m3fn"),
    "656 bytes": ("uint8", "uint32"),
}
"""Dtypes of the pool itself; for other layouts, bytes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      operation: its name.
      layout: name of the layout, or of the kernel groups, with the pool's dtype where it is not bytes.
      implementation: name of the code that moves the bytes.
      ideal: bytes that are read and written if each is once.
      program: the program.
    """

    operation: str
    layout: str
    implementation: str
    ideal: int
    program: programs.Program

    @property
    def name(self) -> str:
        """Operation, layout and implementation."""
        return f"{self.operation}, {self.layout}, {self.implementation}"


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    """Integers."""
    return jax.ShapeDtypeStruct(shape, np.int32)


def pool_of(layout: Layout, dtype: str) -> jax.ShapeDtypeStruct:
    """A pool of that dtype; of two axes where it is no word, as an engine's is."""
    size = -(-layout.end // 128) * 128 // numpy_dtype(dtype).itemsize
    shape = (size,) if dtype.startswith("uint") else (64, size // 64)
    return jax.ShapeDtypeStruct(shape, numpy_dtype(dtype))


def block_bytes(layout: Layout) -> int:
    """Bytes of one block in one layer that carry data."""
    return layout.states_per_block * token_bytes(layout)


def token_bytes(layout: Layout) -> int:
    """Bytes of all parts of one token in one layer."""
    heads = {part.name: layout.shape[2] if part.heads is None else part.heads for part in layout.content}
    return sum(heads[part.name] * part.nbytes for part in layout.content)


Operation = tuple[Callable[..., Any], Callable[[Layout], int]]

OPERATIONS: dict[str, Operation] = {
    "write": (
        lambda layout, code, pool, ids, tokens: paged.write(pool, layout, jnp.int32(1), ids, ids, tokens, code),
        lambda layout: 2 * COUNT * token_bytes(layout),
    ),
    "gather": (
        lambda layout, code, pool, ids, _: (pool, paged.gather(pool, layout, jnp.int32(1), ids, implementation=code)),
        lambda layout: 2 * COUNT * block_bytes(layout),
    ),
    "scatter": (
        lambda layout, code, pool, ids, blocks: paged.scatter(
            pool, layout, jnp.int32(1), ids, blocks, implementation=code
        ),
        lambda layout: 2 * COUNT * block_bytes(layout),
    ),
    "copy_blocks": (
        lambda layout, code, pool, ids, _: paged.copy_blocks(pool, layout, ids, ids + COUNT, code),
        lambda layout: 2 * COUNT * LAYERS * block_bytes(layout),
    ),
    "copy_blocks, disjoint": (
        lambda layout, code, pool, ids, _: paged.copy_blocks(pool, layout, ids, ids + COUNT, code, disjoint=True),
        lambda layout: 2 * COUNT * LAYERS * block_bytes(layout),
    ),
    "zero_blocks": (
        lambda layout, code, pool, ids, _: paged.zero_blocks(pool, layout, ids, code),
        lambda layout: COUNT * LAYERS * block_bytes(layout),
    ),
}


def paged_cases() -> Iterator[Case]:
    """Programs of `hkv.paged`."""
    for (name, layout), (operation, (function, ideal)) in (
        (named, made) for named in LAYOUTS.items() for made in OPERATIONS.items()
    ):
        for dtype in POOLS.get(name, ("uint8",)):
            pool = pool_of(layout, dtype)
            count = COUNT * (layout.states_per_block if operation == "scatter" else 1)
            values = programs.values_of(layout, count) if operation in ("write", "scatter") else None
            label = name if dtype == "uint8" else f"{name} in {dtype}"
            for code in IMPLEMENTATIONS:
                run = functools.partial(function, layout, code)
                nbytes = pool.size * pool.dtype.itemsize
                program = programs.Program(run, (pool, int32(COUNT), values), (0,), nbytes)
                yield Case(operation, label, code, ideal(layout), program)


GROUPS = {
    **programs.GROUPS,
    "32 layers": [programs.geometry(2, 32, 16, 8, 128, "bfloat16")],
    "78 layers of latents": [programs.geometry(3, 78, 64, 1, 576, "bfloat16")],
}


def chunk_cases() -> Iterator[Case]:
    """Programs of `hkv.chunks.transfer`; every block id is moved."""
    for name, geometries in GROUPS.items():
        moved = sum(4 * g.kv_size * g.num_layers * g.page_bytes for g in geometries)
        for operation in ("pack", "unpack"):
            for code in IMPLEMENTATIONS:
                if code == "triton" and "layers" in name:
                    continue  # a launch for each tensor, which the smaller groups show
                yield Case(operation, name, code, 2 * moved, programs.chunk_program(geometries, code, operation))


def all_cases() -> list[Case]:
    """Every program."""
    return [*paged_cases(), *chunk_cases()]
