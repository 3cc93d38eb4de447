"""Moving runs by Triton itself, through jax-triton (an optional extra); a launch for each move.

Its addresses are of 64 bits, so that it moves what Pallas on Triton cannot (`pallas_kernels.triton_tiles.addressable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import jax_triton_call
from pallas_kernels.move.moves import Move, kernel_name, last_start
from pallas_kernels.triton_tiles import NUM_WARPS, Share, shares_of

# Before Triton itself is imported: jax-triton 0.3 clears the variable that names Triton's cache folder.
jax_triton_call.load()

from pallas_kernels.triton_source import move_kernel, move_kernel_of_two_pointers  # noqa: E402


def constants(move: Move, share: Share, source_words: int, target_words: int) -> dict[str, Any]:
    """Constants that the kernel is compiled for."""
    return {
        "runs": move.runs,
        "unit": move.unit,
        "length": move.length,
        "width": share.width,
        "together": share.runs,
        "tiles": share.tiles,
        "last_read": last_start(source_words, move),
        "last_written": last_start(target_words, move),
        "has_read": move.read is not None,
        "has_written": move.written is not None,
        "zeros": move.zeros,
        "own": move.own,
        "reads": move.reads,
    }


def move_runs(
    sources: Sequence[jax.Array], targets: Sequence[jax.Array | jax.ShapeDtypeStruct], moves: Sequence[Move]
) -> tuple[jax.Array, ...]:
    """As `pallas_kernels.move.pallas_triton.move_runs`, a launch for each move; addresses are of 64 bits."""
    found: list[Any] = list(targets)
    for move in moves:
        if move.runs and move.length:
            found[move.target] = _launch(sources, found[move.target], move)
    return tuple(jnp.zeros(t.shape, t.dtype) if isinstance(t, jax.ShapeDtypeStruct) else t for t in found)


def _launch(sources: Sequence[jax.Array], target: Any, move: Move) -> jax.Array:
    nothing = jnp.zeros(1, jnp.int32)
    tables = [nothing if table is None else table for table in (move.read, move.written)]
    source = nothing if move.source is None else sources[move.source].reshape(-1)
    (share,) = shares_of([move], [target.dtype.itemsize])
    made = isinstance(target, jax.ShapeDtypeStruct)
    two = jax_triton_call.two_pointers() and not made
    words = target.size if move.own else source.size
    with jax.named_scope(kernel_name([move], {move.target: target})):
        found = jax_triton_call.call(
            move_kernel_of_two_pointers if two else move_kernel,
            *tables,
            source,
            *([] if made else [target.reshape(-1)]),
            out=jax.ShapeDtypeStruct((target.size,), target.dtype),
            grid=(share.programs,),
            num_warps=NUM_WARPS,
            # The fourth operand, after two tables and the source, is the target.
            **({} if made else {"input_output_aliases": {3: 0}}),
            **constants(move, share, words, target.size),
        )
    return found.reshape(target.shape)
