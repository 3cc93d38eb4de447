"""References by role: who holds a block, and for what. A block that nobody holds is in the pool's id bitmap."""

from __future__ import annotations

import jax.numpy as jnp

from hkv.state import id_bitmap
from hkv.state.loops import Scalar, peek
from hkv.state.pooled import PoolCounter, Role
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("references", "counters", *id_bitmap.WRITES)
"""What these functions write."""


def claim(work: PooledWorkspace, present: Scalar, pool: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """Takes the smallest free block of a pool for a request, if `present`.

    Args:
      work: needs `WRITES` to write.
      present: whether to do it; 0 is returned where not.
      pool: a pool with a free block.

    Returns:
      The workspace, and the block.
    """
    work, block = id_bitmap.take(work, present, pool)
    work = work.write_if(present, "references", 1, work.reference(pool, block, Role.REQUEST))
    return _count(work, present, pool, -1, 1), block


def reference(work: PooledWorkspace, present: Scalar, pool: Scalar, block: Scalar, role: Scalar) -> PooledWorkspace:
    """One more reference to a block that somebody holds, if `present`.

    Args:
      work: needs `WRITES` to write.
      present: whether to do it.
      pool: the block's pool.
      block: its id.
      role: a `Role`.
    """
    work, (request, connector, own) = peek(
        present,
        lambda w: [
            w.read("references", w.reference(pool, block, each)) for each in (Role.REQUEST, Role.CONNECTOR, role)
        ],
        work,
        ("references",),
        (0, 0, 0),
    )
    work = work.write_if(present, "references", own + 1, work.reference(pool, block, role))
    taken = jnp.asarray(present) & (role != int(Role.CACHE)) & (request + connector == 0)
    return _count(work, taken, pool, 0, 1)


def release(work: PooledWorkspace, present: Scalar, pool: Scalar, block: Scalar, role: Scalar) -> PooledWorkspace:
    """One reference less to a block that has one in this role, if `present`; a block that nobody holds then is free.

    Args:
      work: needs `WRITES` to write.
      present: whether to do it.
      pool: the block's pool.
      block: its id.
      role: a `Role`.
    """
    work, counts = peek(
        present,
        lambda w: [w.read("references", w.reference(pool, block, each)) for each in Role],
        work,
        ("references",),
        (0, 0, 0),
    )
    left = [count - (role == int(each)) for each, count in zip(Role, counts, strict=True)]
    own = jnp.where(role == int(Role.REQUEST), left[0], jnp.where(role == int(Role.CONNECTOR), left[1], left[2]))
    work = work.write_if(present, "references", own, work.reference(pool, block, role))
    users = left[Role.REQUEST] + left[Role.CONNECTOR]
    let_go = jnp.asarray(present) & (role != int(Role.CACHE)) & (users == 0)
    free = jnp.asarray(present) & (users + left[Role.CACHE] == 0)
    work = id_bitmap.put(work, free, pool, block)
    return _count(work, free | let_go, pool, free.astype(jnp.int32), -let_go.astype(jnp.int32))


def _count(work: PooledWorkspace, present: Scalar, pool: Scalar, free: Scalar, held: Scalar) -> PooledWorkspace:
    fields = (PoolCounter.FREE, PoolCounter.HELD)
    work, values = peek(
        present,
        lambda w: [w.read("counters", w.pool_counter(pool, field)) for field in fields],
        work,
        ("counters",),
        (0, 0),
    )
    for field, value, change in zip(fields, values, (free, held), strict=True):
        work = work.write_if(present, "counters", value + change, work.pool_counter(pool, field))
    return work
