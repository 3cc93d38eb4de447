"""The id bitmap: which blocks of a pool nobody holds, handed out smallest first.

A tree of words of 32 bits. A bit says whether the word below it has any bit; two levels know 1,024 ids, three 32,768,
four a million. Finding, taking and putting back cost a word a level, however large the pool.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from hkv.state.loops import Scalar, peek
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("bitmap",)
"""What `take` and `put` write."""


def take(work: PooledWorkspace, present: Scalar, pool: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Takes the smallest id out, if `present`.

    Args:
      work: needs `bitmap` to write.
      present: whether to do it; 0 is returned where not.
      pool: a pool that has an id.

    Returns:
      The workspace, and the id.
    """
    levels = work.sizes.buckets.levels

    def descend(w: PooledWorkspace) -> list[Scalar]:
        place, found = jnp.int32(0), []
        for level in reversed(range(len(levels))):
            word = w.read("bitmap", w.word(pool, level, place))
            found += [place, word]
            place = place * 32 + lowest(word)
        return [place, *found]

    work, (id, *found) = peek(present, descend, work, ("bitmap",), (0,) * (1 + 2 * len(levels)))
    emptied = jnp.asarray(present)
    for level in range(len(levels)):
        place, word = found[-2 * level - 2], found[-2 * level - 1]
        rest = word & (word - 1)
        work = work.write_if(emptied, "bitmap", rest, work.word(pool, level, place))
        emptied = emptied & (rest == 0)
    return work, id


def put(work: PooledWorkspace, present: Scalar, pool: Scalar, id: Scalar) -> PooledWorkspace:
    """Puts an id in, if `present`.

    Args:
      work: needs `bitmap` to write.
      present: whether to do it.
      pool: the id's pool.
      id: an id of it.
    """
    levels = range(len(work.sizes.buckets.levels))

    def path(w: PooledWorkspace) -> list[Scalar]:
        return [w.read("bitmap", w.word(pool, level, id >> (5 * level + 5))) for level in levels]

    work, words = peek(present, path, work, ("bitmap",), (0,) * len(levels))
    for level, word in zip(levels, words, strict=True):
        bit = jnp.left_shift(jnp.int32(1), (id >> (5 * level)) & 31)
        work = work.write_if(present, "bitmap", word | bit, work.word(pool, level, id >> (5 * level + 5)))
    return work


def lowest(word: Scalar) -> Scalar:
    """Number of the lowest bit that is set in a word that has one."""
    return lax.population_count((word & -word) - 1)
