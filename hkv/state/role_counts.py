"""References by role: how many of each role hold a block. A block without references is in the pool's id bitmap.

RTP-LLM's `BlockPool` counts requests', connectors' and the cache's references apart, since the same block is free,
available or in use depending on the role that asks. Here each block has a word for each role, and each pool two
counters that follow from them: blocks without references, and blocks that a request or a connector holds. Functions
that end in `_found`, and `let_go`, are handed what was read before, so that a caller can read all that it needs in one
loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from hkv.state.loops import Scalar, peek
from hkv.state.pooled import PoolCounter, Role
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("references", "counters", "bitmap")
"""Arrays that these functions write."""


def claim(work: PooledWorkspace, present: Scalar, pool: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Takes the smallest free block of a pool that has one for a request, if `present`; 0 where not."""
    work, found = peek(present, lambda w: look_free(w, pool), work, ("counters", "bitmap"), (0,) * looked_free(work))
    return claim_found(work, present, pool, found), found[2]


def looked_free(work: PooledWorkspace) -> int:
    """Number of scalars that `look_free` returns."""
    return 3 + len(work.sizes.buckets.levels)


def look_free(work: PooledWorkspace, pool: Scalar) -> list[Scalar]:
    """Scalars that `claim_found` needs of a pool, the smallest free block as the third; reads `counters`, `bitmap`."""
    return [*_counts(work, pool), *smallest_id(work, pool)]


def claim_found(work: PooledWorkspace, present: Scalar, pool: Scalar, seen: Sequence[Scalar]) -> PooledWorkspace:
    """`claim`, handed what `look_free` returned."""
    free, held, *found = seen
    work = take_id(work, present, pool, found)
    work = work.write_if(present, "references", 1, work.reference(pool, found[0], Role.REQUEST))
    work = work.write_if(present, "counters", free - 1, work.pool_counter(pool, PoolCounter.FREE))
    return work.write_if(present, "counters", held + 1, work.pool_counter(pool, PoolCounter.HELD))


def reference(work: PooledWorkspace, present: Scalar, pool: Scalar, block: Scalar, role: Scalar) -> PooledWorkspace:
    """One more reference to a block that is referenced already, if `present`."""
    counts = (("references", work.reference(pool, block, each)) for each in (Role.REQUEST, Role.CONNECTOR, role))
    place = ("counters", work.pool_counter(pool, PoolCounter.HELD))
    work, (held, request, connector, own) = work.peek_each(present, place, *counts)
    work = work.write_if(present, "references", own + 1, work.reference(pool, block, role))
    # RTP-LLM's `available` counts blocks that neither a request nor a connector holds: references of the cache alone
    # do not make a block unavailable, since eviction can take them.
    taken = jnp.asarray(present) & (role != int(Role.CACHE)) & (request + connector == 0)
    return work.write_if(taken, "counters", held + 1, work.pool_counter(pool, PoolCounter.HELD))


def release(work: PooledWorkspace, present: Scalar, pool: Scalar, block: Scalar, role: Scalar) -> PooledWorkspace:
    """One reference less to a block that has one in this role, if `present`; a block that nobody holds then is free."""
    work, seen = peek(present, lambda w: look(w, pool, block), work, WRITES, (0,) * looked(work))
    return let_go(work, present, pool, block, role, seen)


def looked(work: PooledWorkspace) -> int:
    """Number of scalars that `look` returns."""
    return 5 + len(work.sizes.buckets.levels)


def look(work: PooledWorkspace, pool: Scalar, block: Scalar) -> list[Scalar]:
    """Scalars that `let_go` needs of a block; reads `WRITES` within a `hkv.state.loops.peek`."""
    counts = [work.read("references", work.reference(pool, block, each)) for each in Role]
    return [*_counts(work, pool), *counts, *id_path(work, pool, block)]


def let_go(
    work: PooledWorkspace, present: Scalar, pool: Scalar, block: Scalar, role: Scalar, seen: Sequence[Scalar]
) -> PooledWorkspace:
    """`release`, handed what `look` returned."""
    free, held, request, connector, cache, *words = seen
    left = [count - (role == int(each)) for each, count in zip(Role, (request, connector, cache), strict=True)]
    own = jnp.where(role == int(Role.REQUEST), left[0], jnp.where(role == int(Role.CONNECTOR), left[1], left[2]))
    work = work.write_if(present, "references", own, work.reference(pool, block, role))
    users = left[Role.REQUEST] + left[Role.CONNECTOR]
    unused = jnp.asarray(present) & (role != int(Role.CACHE)) & (users == 0)
    # Only without any reference is the id free. Blocks that the cache alone holds come back by eviction, never by
    # `malloc`.
    nobody = jnp.asarray(present) & (users + left[Role.CACHE] == 0)
    work = put_id(work, nobody, pool, block, words)
    work = work.write_if(nobody, "counters", free + 1, work.pool_counter(pool, PoolCounter.FREE))
    return work.write_if(unused, "counters", held - 1, work.pool_counter(pool, PoolCounter.HELD))


def _counts(work: PooledWorkspace, pool: Scalar) -> list[Scalar]:
    return [work.read("counters", work.pool_counter(pool, each)) for each in PoolCounter]


# The id bitmap: the free blocks of a pool, handed out smallest first.
#
# A tree of words of 32 bits. A bit says whether the word below it has any bit; two levels know 1,024 ids, three 32,768,
# four a million. Finding, taking and putting back cost a word a level, however large the pool. What is read
# (`smallest_id`, `id_path`) is read within a `hkv.state.loops.peek`; what is written is handed what was read.


def smallest_id(work: PooledWorkspace, pool: Scalar) -> list[Scalar]:
    """The smallest id of a pool that has one, and the words on the way to it, the ids' own last."""
    place, words = jnp.int32(0), []
    for level in reversed(range(len(work.sizes.buckets.levels))):
        words.append(work.read("bitmap", work.word(pool, level, place)))
        # The lowest bit of an upper word leads to the lower word with the smallest id: RTP-LLM's `BlockPool::malloc`
        # takes the first of a sorted set, and ids must agree, not just be free.
        place = place * 32 + lowest(words[-1])
    return [place, *words]


def take_id(work: PooledWorkspace, present: Scalar, pool: Scalar, found: Sequence[Scalar]) -> PooledWorkspace:
    """Takes the smallest id, as `smallest_id` found it, out, if `present`."""
    id, *words = found
    emptied = jnp.asarray(present)
    for level, word in enumerate(reversed(words)):
        # Clears the lowest set bit. Only if that empties the word does the bit one level up go.
        rest = word & (word - 1)
        work = work.write_if(emptied, "bitmap", rest, work.word(pool, level, id >> (5 * level + 5)))
        emptied = emptied & (rest == 0)
    return work


def id_path(work: PooledWorkspace, pool: Scalar, id: Scalar) -> list[Scalar]:
    """The words that say whether an id is in, the ids' own first."""
    levels = range(len(work.sizes.buckets.levels))
    return [work.read("bitmap", work.word(pool, level, id >> (5 * level + 5))) for level in levels]


def put_id(
    work: PooledWorkspace, present: Scalar, pool: Scalar, id: Scalar, words: Sequence[Scalar]
) -> PooledWorkspace:
    """Puts an id in, if `present`; `words` is its `id_path`."""
    for level, word in enumerate(words):
        bit = jnp.left_shift(jnp.int32(1), (id >> (5 * level)) & 31)
        work = work.write_if(present, "bitmap", word | bit, work.word(pool, level, id >> (5 * level + 5)))
    return work


def lowest(word: Scalar) -> Scalar:
    """Number of the lowest bit that is set in a word that has one."""
    # `word & -word` isolates the lowest bit, also in int32 where the sign bit is that bit; one less than it has as
    # many ones as zeros stood below.
    return lax.population_count((word & -word) - 1)
