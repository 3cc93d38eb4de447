"""The decode write: a step's new tokens of all layers and groups, in one launch of a kernel.

It is what vLLM's `reshape_and_cache_flash` and FlashInfer's `append_paged_kv_cache` do for one layer.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.views.jax import without_derivative
from hkv.layout.views.numpy import numpy_dtype
from hkv.layout.views.runs import to_words
from hkv.paged import plan
from hkv.paged.implementations import choose
from hkv.paged.words import WIDEST, as_words, like, runs_of_pools
from hkv.typed_jit import Ids, require_array, require_whole, typed_jit
from pallas_kernels.move.moves import LARGEST, Move, saturated

Values = Mapping[str, jax.Array]


@typed_jit(static_argnames=("layouts", "pool_of", "implementation"), donate_argnames="pools")
def write_step(
    pools: tuple[jax.Array, ...],
    layouts: tuple[Layout, ...],
    blocks: tuple[Ids, ...],
    states: tuple[Ids, ...],
    values: tuple[Values, ...],
    scales: tuple[Values, ...] | None = None,
    pool_of: tuple[int, ...] | None = None,
    implementation: str | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """New keys and values of every layer of every group, one state a token.

    The launches of a kernel do not depend on the number of layers or groups; XLA's are one for each part of each group.

    Args:
      pools: pools of any dtype and rank, donated. Groups may lie in one, as they do in vLLM, or each in its own.
      layouts: layout of each group, of all its layers (static).
      blocks: per group, int32 `[tokens]`, as in `write`.
      states: per group, int32 `[tokens]`.
      values: per group and part, `[layers, tokens, heads, *part.shape]`.
      scales: per group, per part that is to be quantised, the float32 scale of the tensor, scalar or `[layers]`, as in
        `quantize_per_tensor`: values are then of any float dtype. None quantises nothing.
      pool_of: for each group, which pool it lies in (static); None where there is one pool, or one for each group.
      implementation: as in `write`.

    Returns:
      The pools, and how many slots did not exist, each counted once for all layers (int32).

    Raises:
      LayoutError: groups that do not agree in number; otherwise as `write`.
    """
    places = _places(len(pools), len(layouts), pool_of)
    for name, given in (("blocks", blocks), ("states", states), ("values", values), ("scales", scales or layouts)):
        if len(given) != len(layouts):
            raise LayoutError(name, f"{len(given)} groups", f"{len(layouts)}, one for each layout")
    views = [
        [(plan.part_view(layout, part), plan.TOKEN) for part in some]
        for layout, some in zip(layouts, values, strict=True)
    ]
    each = scales or ({},) * len(layouts)
    quantised = any(part in some for given, some in zip(values, each, strict=True) for part in given)
    # Words of an element each, which XLA, and the kernel that can, make as they write them.
    dtypes, found = runs_of_pools(pools, places, views, 1 if quantised else WIDEST)
    moves, sources, missing = [], [], []
    for group, (layout, some) in enumerate(zip(layouts, values, strict=True)):
        slots = require_array("blocks", blocks[group], (None,), error=LayoutError)
        within = require_array("states", states[group], (slots.shape[0],), error=LayoutError)
        layers = jnp.arange(layout.num_layers, dtype=jnp.int32)[:, None]
        coordinates = layers, slots[None], within[None] // layout.shape[3], within[None] % layout.shape[3]
        for (part, content), runs in zip(some.items(), found[group], strict=True):
            starts, _ = runs.start_rows(*coordinates)
            move = plan.move_of(runs, len(sources), places[group], written=starts)
            ready, made = _ready(layout, part, content, each[group].get(part), move, dtypes[places[group]])
            _check(part, ready.shape, made.dtype or ready.dtype.name, layout, slots.shape[0])
            moves.append(made)
            flat = ready.reshape(-1, *ready.shape[2:])
            sources.append(ready.reshape(-1) if made.dtype else to_words(flat, runs, dtypes[places[group]]).reshape(-1))
        inside = (slots >= 0) & (slots < layout.num_blocks) & (within >= 0) & (within < layout.states_per_block)
        missing.append(jnp.sum((slots != -1) & ~inside, dtype=jnp.int32))
    words = [as_words(pool, dtype) for pool, dtype in zip(pools, dtypes, strict=True)]
    written = choose(implementation).move_runs(sources, words, moves)
    return tuple(map(like, written, pools)), jnp.sum(jnp.stack(missing), dtype=jnp.int32)


def _places(num_pools: int, num_groups: int, pool_of: tuple[int, ...] | None) -> tuple[int, ...]:
    """The pool of each group."""
    if pool_of is None:
        pool_of = (0,) * num_groups if num_pools == 1 else tuple(range(num_pools))
    if len(pool_of) != num_groups or not num_groups or any(not 0 <= pool < num_pools for pool in pool_of):
        raise LayoutError("pool_of", pool_of, f"one of {num_pools} pools for each of {num_groups} groups")
    return pool_of


def _ready(
    layout: Layout, part: str, content: jax.Array, scale: jax.Array | None, move: Move, word: np.dtype
) -> tuple[jax.Array, Move]:
    """The source of a move, and the move, which quantises if there is a scale and the words are elements."""
    argument, dtype = f"values[{part!r}]", layout.part(part).dtype
    content = require_whole(argument, without_derivative(argument, content), LayoutError)
    if scale is None:
        return content, move
    scale = jnp.asarray(scale, jnp.float32)
    scale = scale.reshape(scale.shape + (1,) * (content.ndim - scale.ndim) if scale.ndim else ())
    if word.itemsize > 1:
        return quantize_per_tensor(content, scale, dtype), move
    shape = (layout.num_layers, move.runs // layout.num_layers)
    reciprocal = jnp.broadcast_to((np.float32(1) / scale).reshape(-1, 1), shape).reshape(-1)
    return check_quantised(content, dtype), dataclasses.replace(move, reciprocal=reciprocal, dtype=dtype)


def _check(name: str, given: tuple[int, ...], dtype: str, layout: Layout, tokens: int) -> None:
    part = layout.part(name)
    heads = layout.shape[2] if part.heads is None else part.heads
    shape = (layout.num_layers, tokens, heads, *part.shape)
    if given != shape or dtype != numpy_dtype(part.dtype).name:
        raise LayoutError(f"values[{name!r}]", f"{dtype}{list(given)}", f"{part.dtype}{list(shape)}")


# Quantisation of keys and values on their way into pages: per tensor, or per token and head with stored scales.


def quantize_per_tensor(values: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """`values` times the reciprocal of `scale`, a float32 scalar, rounded to nearest even and saturated.

    The cache does not hold the scale. LayoutError for a dtype that is none of `LARGEST`, and for integers' derivatives.
    """
    return saturated(check_quantised(values, dtype).astype(jnp.float32) * (np.float32(1) / scale), dtype)


LEAST_SCALE = np.float32(1e-6)
"""Least scale of a token and head, that of zeros (vLLM 0.33)."""


def quantize_per_token_head(values: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Values scaled so that the largest magnitude of each (token, head) is the largest the dtype holds.

    Of values `[tokens, heads, elements]` it gives the quantised ones, and float32 `[tokens, heads]` such that
    `quantised * scale` is about `values`: the largest magnitude over the dtype's largest, at least `LEAST_SCALE`.
    Halves of int8 are rounded away from zero, unlike those of `quantize_per_tensor` (vLLM 0.33
    `triton_reshape_and_cache_flash_per_token_head_quant`).
    """
    wide = check_quantised(values, dtype).astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    # XLA turns a division by one number into a multiplication, which may differ in the last bit; not one by an array.
    largest, most = jax.lax.optimization_barrier((largest, jnp.full_like(largest, LARGEST[dtype])))
    scale = jnp.maximum(largest / most, LEAST_SCALE)
    scaled = wide * (np.float32(1) / scale)[..., None]
    if dtype == "int8":
        scaled = jnp.trunc(jnp.where(scaled >= 0, scaled + np.float32(0.5), scaled - np.float32(0.5)))
    return saturated(scaled, dtype), scale


def check_quantised(values: jax.Array, dtype: str) -> jax.Array:
    """Values that may become elements of `dtype`; LayoutError where they are differentiated and become integers."""
    if dtype not in LARGEST:
        raise LayoutError("dtype", dtype, f"one of {', '.join(LARGEST)}")
    return without_derivative("values", values) if dtype == "int8" else values
