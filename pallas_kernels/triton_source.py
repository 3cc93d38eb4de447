"""The kernel of the `triton` implementation, in Triton itself; imports nothing but Triton.

It comes twice, for releases of jax-triton differ in whether an aliased buffer is one pointer or two. Conditions are
of vectors: Triton's interpreter makes int32 of a comparison of scalars that is broadcast, and refuses it as a mask.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def move_kernel(
    read,
    written,
    source,
    target,
    runs: tl.constexpr,
    unit: tl.constexpr,
    length: tl.constexpr,
    width: tl.constexpr,
    together: tl.constexpr,
    tiles: tl.constexpr,
    last_read: tl.constexpr,
    last_written: tl.constexpr,
    has_read: tl.constexpr,
    has_written: tl.constexpr,
    zeros: tl.constexpr,
    own: tl.constexpr,
    reads: tl.constexpr,
):
    """`together` runs of one move, or a tile of one run: see `pallas_kernels.move.moves.Move`."""
    program = tl.program_id(0)
    # Programs of one group of runs stand side by side: their tables' words are then in the same cache lines.
    run = program // tiles * together + tl.arange(0, together)
    column = program % tiles * width + tl.arange(0, width)
    present = run < runs
    if has_read:
        start = tl.load(read + run, mask=present, other=-1)
        there = (start >= 0) & (start <= last_read)
    else:
        start = run * (length // unit)
        there = present
    if has_written:
        to = tl.load(written + run, mask=present, other=-1)
        kept = (to >= 0) & (to <= last_written)
    else:
        to = run * (length // unit)
        kept = present
    # A run that reads from outside moves nothing, not even zeros, unless the move asks for those.
    if not zeros:
        kept = kept & there
    inside = (column < length)[None, :]
    origin = target if own else source
    # 64 bits before the multiplication: a start in units fits 32, the word it names need not.
    place = origin + tl.where(there, start, 0).to(tl.int64)[:, None] * unit + column[None, :]
    words = tl.load(place, mask=there[:, None] & inside & reads, other=0)
    place = target + tl.where(kept, to, 0).to(tl.int64)[:, None] * unit + column[None, :]
    tl.store(place, words, mask=kept[:, None] & inside)


@triton.jit
def move_kernel_of_two_pointers(
    read,
    written,
    source,
    target_in,
    target,
    runs: tl.constexpr,
    unit: tl.constexpr,
    length: tl.constexpr,
    width: tl.constexpr,
    together: tl.constexpr,
    tiles: tl.constexpr,
    last_read: tl.constexpr,
    last_written: tl.constexpr,
    has_read: tl.constexpr,
    has_written: tl.constexpr,
    zeros: tl.constexpr,
    own: tl.constexpr,
    reads: tl.constexpr,
):
    """`move_kernel` where the aliased target arrives as an input and as an output (jax-triton before 0.4)."""
    move_kernel(
        read, written, source, target, runs, unit, length, width, together, tiles, last_read, last_written, has_read,
        has_written, zeros, own, reads,
    )  # fmt: skip
