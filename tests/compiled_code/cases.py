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
DTYPES = ("float32", "float8_e4m3fn")
FEW = ("LBNHC", "LHBNC", "latent of 576", "656 bytes", "132 bytes", "LBNHC of 32 layers")
"""Layouts that stand for all where the compiler is the same as another implementation's."""


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

POOLS = {"LBNHC": ("uint8", "uint32", "bfloat16", "float8_e4m3fn"), "656 bytes": ("uint8", "uint32")}
"""Dtypes of the pool itself; for other layouts, bytes."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One program, by the operation, the layout or kernel groups (with the pool's dtype where it is not bytes) and the
    code that moves the bytes. `ideal` are the bytes that are read and written if each is once.
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


def step_values(layout: Layout, dtype: str | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Tokens of all layers, of another dtype if they are to be quantised."""
    return {
        part: jax.ShapeDtypeStruct((layout.num_layers, *one.shape), numpy_dtype(dtype) if dtype else one.dtype)
        for part, one in programs.values_of(layout, COUNT).items()
    }


def _step(layout: Layout, code: str, pool: Any, ids: Any, values: Any) -> Any:
    pools, dropped = paged.write_step((pool,), (layout,), (ids,), (ids,), (values,), implementation=code)
    return pools[0], dropped


def _quantised_step(layout: Layout, code: str, pool: Any, ids: Any, values: Any) -> Any:
    scales = dict.fromkeys(values, np.float32(0.5))
    pools, dropped = paged.write_step((pool,), (layout,), (ids,), (ids,), (values,), (scales,), implementation=code)
    return pools[0], dropped


def _batch(layout: Layout, code: str, pool: Any, ids: Any, values: Any) -> Any:
    return jax.vmap(lambda *mine: paged.write(mine[0], layout, jnp.int32(1), mine[1], mine[1], mine[2], code))(
        pool, ids, values
    )


def is_compiled(name: str, code: str) -> bool:
    """Leaves out programs that differ from others in nothing that is compiled."""
    return code != "triton" or name in FEW


def paged_cases() -> Iterator[Case]:
    """Programs of `hkv.paged`."""
    for (name, layout), (operation, (function, ideal)) in (
        (named, made) for named in LAYOUTS.items() for made in OPERATIONS.items()
    ):
        for dtype in POOLS.get(name, ("uint8",)) if operation in ("write", "gather") else ("uint8",):
            count = COUNT * (layout.states_per_block if operation == "scatter" else 1)
            values = programs.values_of(layout, count) if operation in ("write", "scatter") else None
            label = name if dtype == "uint8" else f"{name} in {dtype}"
            for code in IMPLEMENTATIONS:
                if is_compiled(label, code):
                    yield case_of(operation, label, code, layout, function, ideal(layout), values, dtype)


def case_of(
    operation: str, label: str, code: str, layout: Layout, function: Any, ideal: int, values: Any, dtype: str = "uint8"
) -> Case:
    """One program of `hkv.paged`."""
    pool = pool_of(layout, dtype)
    program = programs.Program(
        functools.partial(function, layout, code), (pool, int32(COUNT), values), (0,), pool.size * pool.dtype.itemsize
    )
    return Case(operation, label, code, ideal, program)


def step_cases() -> Iterator[Case]:
    """The decode write, and the write of a batch of pools."""
    spec = FullAttention(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    deep = Layout.of_spec(spec, "LBNHC", num_blocks=64, num_layers=32)
    for code in IMPLEMENTATIONS:
        for name, layout in {**LAYOUTS, "LBNHC of 32 layers": deep}.items():
            if is_compiled(name, code):
                ideal = 2 * COUNT * layout.num_layers * token_bytes(layout)
                yield case_of("write_step", name, code, layout, _step, ideal, step_values(layout))
        for dtype in ("int8", "float8_e4m3fn"):
            layout = attention("LBNHC", dtype)
            ideal, wide = 3 * COUNT * LAYERS * token_bytes(layout), step_values(layout, "bfloat16")
            yield case_of("write_step, quantised", dtype, code, layout, _quantised_step, ideal, wide)
        layout = LAYOUTS["LBNHC"]
        values, ideal = programs.values_of(layout, COUNT), 8 * COUNT * token_bytes(layout)
        made = case_of("write, a batch of 4", "LBNHC", code, layout, _batch, ideal, values)
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct((4, *a.shape), a.dtype), made.program.arguments)
        yield dataclasses.replace(made, program=made.program._replace(arguments=arguments))


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
    return [*paged_cases(), *step_cases(), *chunk_cases()]
