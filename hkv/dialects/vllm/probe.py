"""One question to the key table: do all the groups that are looked up together hold a key?"""

from __future__ import annotations

import dataclasses

from hkv.dialects.vllm.parameters import GroupField, View
from hkv.state.loops import Scalar, loop
from hkv.state.workspace import Workspace

READS = ("table", "chains")
WRITES = ("rows",)
"""What a finder's loop reads and writes."""


@dataclasses.dataclass(frozen=True)
class Query:
    """One lookup of the groups that share a spec.

    Attributes:
      slot: the request.
      first: first column of the groups in the key table.
      count: how many they are.
      block: tokens in a manager block.
      scale: hash blocks in it.
      reach: what the kind says.
      need: blocks a window needs.
      steps: manager blocks between two lengths that a hit may have.
      length: tokens to look at.
      drop: whether the last block of the hit cannot be trusted.
      limit: manager blocks that may be looked at: whole ones within `length` that have a key.
    """

    slot: Scalar
    first: Scalar
    count: Scalar
    block: Scalar
    scale: Scalar
    reach: Scalar
    need: Scalar
    steps: Scalar
    length: Scalar
    drop: Scalar
    limit: Scalar


def cached(work: Workspace, parameters: View, query: Query, index: Scalar) -> tuple[Workspace, Scalar]:
    """Whether every group has the manager block at `index`; their blocks are written to the request's rows.

    Args:
      work: needs `READS` to read and `WRITES` to write.
      parameters: the configuration.
      query: the lookup.
      index: of a manager block, below `query.limit`.
    """
    key = work.read("chains", query.slot, (index + 1) * query.scale - 1)
    group = parameters.group(query.first, GroupField.MEMBER)
    value = work.read("table", key, query.first)
    work = work.write("rows", value >> 3, query.slot, group, index)

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        member, _ = local
        column = query.first + member
        other = w.read("table", key, column)
        w = w.write("rows", other >> 3, query.slot, parameters.group(column, GroupField.MEMBER), index)
        return w, (member + 1, other > 0)

    work, (_, found) = loop(
        lambda c: (c[0] < query.count) & c[1], body, work, (1, value > 0), reads=("table",), writes=WRITES
    )
    return work, found
