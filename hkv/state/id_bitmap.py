"""The id bitmap: which blocks of a pool nobody holds, handed out smallest first.

A tree of words of 32 bits. A bit says whether the word below it has any bit; two levels know 1,024 ids, three 32,768,
four a million. Finding, taking and putting back cost a word a level, however large the pool. What is read (`smallest`,
`path`) is read within a `hkv.state.loops.peek`; what is written (`take`, `put`) is handed what was read.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from hkv.state.loops import Scalar
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("bitmap",)
"""Arrays that `take` and `put` write."""


def smallest(work: PooledWorkspace, pool: Scalar) -> list[Scalar]:
    """The smallest id of a pool that has one, and the words on the way to it, the ids' own last."""
    place, words = jnp.int32(0), []
    for level in reversed(range(len(work.sizes.buckets.levels))):
        words.append(work.read("bitmap", work.word(pool, level, place)))
        # The lowest bit of an upper word leads to the lower word with the smallest id: RTP-LLM's `BlockPool::malloc`
        # takes the first of a sorted set, and ids must agree, not just be free.
        place = place * 32 + lowest(words[-1])
    return [place, *words]


def take(work: PooledWorkspace, present: Scalar, pool: Scalar, found: Sequence[Scalar]) -> PooledWorkspace:
    """Takes the smallest id, as `smallest` found it, out, if `present`."""
    id, *words = found
    emptied = jnp.asarray(present)
    for level, word in enumerate(reversed(words)):
        # Clears the lowest set bit. Only if that empties the word does the bit one level up go.
        rest = word & (word - 1)
        work = work.write_if(emptied, "bitmap", rest, work.word(pool, level, id >> (5 * level + 5)))
        emptied = emptied & (rest == 0)
    return work


def path(work: PooledWorkspace, pool: Scalar, id: Scalar) -> list[Scalar]:
    """The words that say whether an id is in, the ids' own first."""
    levels = range(len(work.sizes.buckets.levels))
    return [work.read("bitmap", work.word(pool, level, id >> (5 * level + 5))) for level in levels]


def put(work: PooledWorkspace, present: Scalar, pool: Scalar, id: Scalar, words: Sequence[Scalar]) -> PooledWorkspace:
    """Puts an id in, if `present`; `words` is its `path`."""
    for level, word in enumerate(words):
        bit = jnp.left_shift(jnp.int32(1), (id >> (5 * level)) & 31)
        work = work.write_if(present, "bitmap", word | bit, work.word(pool, level, id >> (5 * level + 5)))
    return work


def lowest(word: Scalar) -> Scalar:
    """Number of the lowest bit that is set in a word that has one."""
    # `word & -word` isolates the lowest bit, also in int32 where the sign bit is that bit; one less than it has as
    # many ones as zeros stood below.
    return lax.population_count((word & -word) - 1)
