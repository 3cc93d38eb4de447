"""The kernels of the `triton` implementation, in Triton itself; imports nothing but Triton.

A run is contiguous, so it is copied as one stretch of words. Each kernel takes what differs between releases of
jax-triton, whether an aliased buffer is one pointer or two, from its caller.

A run that is not inside has no words to move. That is written as a length of 0 and not as `mask & inside`: Triton's
interpreter makes int32 of a comparison of scalars that is broadcast, and from 3.9 on refuses it as a mask.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def gather_kernel(starts, pool, out, last: tl.constexpr, row: tl.constexpr, length: tl.constexpr, width: tl.constexpr):
    """One tile of one run from the pool, or zeros where the run is not inside."""
    run = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + run).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    inside = (start >= 0) & (start <= last)
    present = columns < tl.where(inside, length, 0)
    words = tl.load(pool + tl.where(inside, start, 0) * row + columns, mask=present, other=0)
    tl.store(out + run * length + columns, words, mask=columns < length)


@triton.jit
def scatter_kernel(
    starts,
    values,
    pool,
    last: tl.constexpr,
    row: tl.constexpr,
    length: tl.constexpr,
    width: tl.constexpr,
):
    """One tile of one run into the pool, or nothing where the run is not inside."""
    run = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + run).to(tl.int64)
    columns = tl.program_id(1) * width + tl.arange(0, width)
    inside = (start >= 0) & (start <= last)
    mask = columns < tl.where(inside, length, 0)
    words = tl.load(values + run * length + columns, mask=mask)
    tl.store(pool + tl.where(inside, start, 0) * row + columns, words, mask=mask)


@triton.jit
def scatter_kernel_of_two_pointers(
    starts,
    values,
    pool_in,
    pool,
    last: tl.constexpr,
    row: tl.constexpr,
    length: tl.constexpr,
    width: tl.constexpr,
):
    """`scatter_kernel` where the aliased pool arrives as an input and as an output (jax-triton before 0.4)."""
    scatter_kernel(starts, values, pool, last, row, length, width)
