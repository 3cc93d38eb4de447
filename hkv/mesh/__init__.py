"""Caches on several devices: parallel shapes, sharding, and moving requests between meshes (`docs/serving.md`).

`ParallelShape` says which rank holds which heads and tokens. `write`, `gather`, `copy_blocks` and `zero_blocks` are
those of `hkv`, on the pools of a `ShardedLayout`. `plan_resharding` plans what goes from one `Side` to another, and
`execute` does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv._lazy import loader

if TYPE_CHECKING:
    from hkv.mesh.parallel_shape import ParallelShape, Rank
    from hkv.mesh.resharding import Move, Plan, Side, plan_resharding
    from hkv.mesh.sharding import ShardedLayout, copy_blocks, gather, make_mesh, write, zero_blocks
    from hkv.mesh.transfer import execute

__all__ = [
    "Move",
    "ParallelShape",
    "Plan",
    "Rank",
    "ShardedLayout",
    "Side",
    "copy_blocks",
    "execute",
    "gather",
    "make_mesh",
    "plan_resharding",
    "write",
    "zero_blocks",
]

__getattr__ = loader(
    __name__,
    {
        "hkv.mesh.parallel_shape": "ParallelShape Rank",
        "hkv.mesh.resharding": "Move Plan Side plan_resharding",
        "hkv.mesh.transfer": "execute",
        "hkv.mesh.sharding": "ShardedLayout copy_blocks gather make_mesh write zero_blocks",
    },
)
