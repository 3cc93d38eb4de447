"""The two loops that look a group up: from some block on to the right, and from the last one to the left.

A kind of layer says by a `Search` how it is looked up; nothing else in here knows kinds.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules import rows
from hkv.dialects.vllm.rules.parameters import GroupField, View
from hkv.state.key_table import first_block
from hkv.state.loops import Scalar, divide, fori_loop, loop, remainder
from hkv.state.workspace import Workspace

READS = ("table", "chains")
WRITES = ("rows",)
"""Arrays that a loop reads and writes."""


class Query(NamedTuple):
    """One lookup of the groups that share a spec.

    Attributes:
      slot: the request.
      first: first column of the groups in the key table.
      members: number of these groups.
      block: tokens in a manager block.
      scale: hash blocks in it.
      unit, lookback, halvings: as in `hkv.dialects.vllm.rules.reads`.
      need: blocks a window needs.
      steps: manager blocks between two lengths that a hit may have.
      length: tokens to look at.
      drop: whether the last block of the hit cannot be trusted.
      limit: manager blocks that may be looked at: whole ones within `length` that have a key.
      units: hash blocks that may be looked at.
    """

    slot: Scalar
    first: Scalar
    members: Scalar
    block: Scalar
    scale: Scalar
    unit: Scalar
    lookback: Scalar
    halvings: Scalar
    need: Scalar
    steps: Scalar
    length: Scalar
    drop: Scalar
    limit: Scalar
    units: Scalar


class Search(NamedTuple):
    """Parameters of a search for a kind's longest hit, in blocks.

    `backward`: from the last block to the left, for a run of `need` blocks; else from `start` on to the right, those
    before it counted as hit without a look. `need` is 0 for a kind that can be resumed anywhere; where the query's
    `unit` is more than a token, as many more as stand between the last multiple of it and the run's end; where it has
    `halvings`, as many as the run's end asks for. There, and where there are sinks, none before the first block: vLLM
    0.33 would round a run that begins there down before it drops a block. `drop`: the last block found is given up.
    `sinks`: blocks at the beginning that every hit needs, looked up first.
    """

    backward: Scalar
    start: Scalar
    need: Scalar
    drop: Scalar
    sinks: Scalar

    @property
    def looks_right(self) -> Scalar:
        """True if anything is looked up from the left."""
        return ~self.backward | (self.sinks > 0)


def forward(
    work: Workspace, view: View, query: Query, search: Search, enabled: Scalar
) -> tuple[Workspace, Scalar, Scalar]:
    """The run of cached blocks from the search's start on, in manager blocks, and the first of them that is not null.

    Blocks found are written to the request's rows. A group after the first is looked up no further than the ones before
    it reached.
    """
    start = search.start
    groups = work.sizes.buckets.groups

    def member(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        column, limit = local
        row = w.row(query.slot, view.group(column, GroupField.MEMBER))
        # The key of a manager block is that of its last hash block: a key stands for the whole prefix.
        chain = w.chain(query.slot) + (query.scale - 1)

        def step(v: Workspace, at: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
            i, _ = at
            key = v.read("chains", chain + i * query.scale)
            value = v.read("table", v.entry(key * groups + column))
            # Also of the block that ends the run: the write is cheaper than a test, and beyond the hit nobody reads
            # the row.
            v = v.write("rows", first_block(value), row + i)
            return v, (i + 1, value > 0)

        # `FullAttentionManager.find_longest_cache_hit` stops at the first miss. So does this, a trip for each block
        # found.
        w, (end, found) = loop(lambda c: (c[0] < limit) & c[1], step, w, (start, True), reads=READS, writes=WRITES)
        return w, (column + 1, end - ~found)

    end = jnp.where(enabled, query.first + query.members, query.first)
    names = (*READS, *WRITES)
    work, (_, length) = loop(lambda c: c[0] < end, member, work, (query.first, query.limit), writes=names)
    # EAGLE gives up the last block: its last token's hidden state was not cached. Then the length is cut to where
    # hits may end; `SlidingWindowManager` goes the other way round, and so does `backward`.
    length -= search.drop & (length > 0)
    length -= remainder(length, query.steps)
    return work, length, jnp.minimum(start, length)


def backward(
    work: Workspace, view: View, query: Query, search: Search, enabled: Scalar
) -> tuple[Workspace, Scalar, Scalar]:
    """The last run of enough cached blocks that ends where a hit may end, or a shorter one from the first block on.

    Returned in manager blocks, with the first that is not null. Blocks found are written to the request's rows. Between
    the sinks, which are there, and the run they are null.
    """
    anywhere = search.need <= 0
    own = (query.unit > 1) | (search.sinks > 0) | (query.halvings > 0)
    # The least run, which `need` has, or the block to be dropped is among those that a halved length asks for.
    counted = (query.halvings > 0) & ~search.drop
    units = jnp.maximum(divide(query.unit, query.block), 1)

    def body(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        i, run, _, phase, need, beyond = local
        w, found = _cached(w, view, query, i)
        # A run may only begin (at its right end) where a hit may end, `phase` 0; from there on it goes on block by
        # block.
        run = jnp.where(found & ((run > 0) | (phase == 0)), run + 1, 0)
        phase = jnp.where(phase == 0, query.steps - 1, phase - 1)
        # A chunk's beginning lies where a multiple of its size is: how many blocks a run must have depends on where
        # it ends.
        # Where what is read grows with the length, so does the run: by what the length halved leaves, and no more by 0.
        length = i + 1 - search.drop
        grown = beyond + length - jnp.right_shift(length, query.halvings) - counted
        need = jnp.where(own & (run == 1), jnp.minimum(search.need + grown, i + 1), need)
        beyond = jnp.where(beyond == 0, units - 1, beyond - 1)
        return w, (i - 1, run, (run > 0) & (run >= need), phase, need, beyond)

    last = jnp.where(enabled & ~anywhere, query.limit, 0) - 1
    phase = remainder(jnp.maximum(last + 1 - search.drop, 0), query.steps)
    beyond = remainder(jnp.maximum(last + 1 - search.drop, 0), units)
    start = (last, 0, False, phase, search.need, beyond)
    work, (i, run, filled, *_) = loop(lambda c: (c[0] >= 0) & ~c[2], body, work, start, reads=READS, writes=WRITES)
    # A loop that came to the first block without enough of them: what was found reaches to the beginning, and counts.
    first = jnp.where(filled, i + 1, 0)
    length = jnp.where(anywhere, query.limit, first + run)
    first = jnp.where(anywhere, length, first)
    length -= jnp.where(filled, 0, remainder(length, query.steps))
    length -= search.drop & (length > 0)
    length -= jnp.where(search.drop, remainder(length, query.steps), 0)
    first = jnp.minimum(first, length)
    sinks = enabled & (search.sinks > 0)
    end = jnp.where(sinks, query.first + query.members, query.first)

    def skip(column: Scalar, w: Workspace) -> Workspace:
        w = rows.null(w, query.slot, view.group(column, GroupField.MEMBER), search.sinks, first)
        return w

    work = fori_loop(query.first, end, skip, work, writes=WRITES)
    return work, length, jnp.where(sinks, 0, first)


def inside(
    work: Workspace, view: View, query: Query, search: Search, whole: Scalar, enabled: Scalar
) -> tuple[Workspace, Scalar, Scalar]:
    """The last hash block up to which every group has a block, which may be filled partly; and the first block not
    null.

    Looked for from the last one to the left: of all of the request's for a kind that is looked up backward, else of the
    manager block after the `whole` ones that were found. The block found is written to the request's rows.
    """
    least = jnp.where(search.backward, 0, whole * query.scale)
    most = jnp.where(search.backward, query.units, jnp.minimum(query.units, least + query.scale - 1))

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        i, _ = local
        w, found = _known(w, view, query, i, divide(i, query.scale))
        return w, (i - 1, found)

    start = (jnp.where(enabled, most, least) - 1, False)
    work, (last, found) = loop(lambda c: (c[0] >= least) & ~c[1], body, work, start, reads=READS, writes=WRITES)
    # `last` is one before the unit at which the search stopped, found or not.
    units = jnp.maximum(last + 1 + found, least)
    first = jnp.where(search.backward, divide(jnp.maximum(units - 1, 0), query.scale), 0)
    return work, units - (search.drop & (units > 0)), first


def _cached(work: Workspace, view: View, query: Query, index: Scalar) -> tuple[Workspace, Scalar]:
    """True if every group has the manager block at `index`."""
    return _known(work, view, query, (index + 1) * query.scale - 1, index)


def _known(work: Workspace, view: View, query: Query, unit: Scalar, entry: Scalar) -> tuple[Workspace, Scalar]:
    """True if every group has a block that is cached up to a hash block; it becomes an entry of their rows."""
    groups = work.sizes.buckets.groups
    key = work.read("chains", work.chain(query.slot) + unit)

    def has(w: Workspace, column: Scalar) -> tuple[Workspace, Scalar]:
        value = w.read("table", w.entry(key * groups + column))
        row = w.row(query.slot, view.group(column, GroupField.MEMBER))
        return w.write("rows", first_block(value), row + entry), value > 0

    def body(w: Workspace, local: tuple[Scalar, Scalar]) -> tuple[Workspace, tuple[Scalar, Scalar]]:
        w, found = has(w, local[0])
        return w, (local[0] + 1, found)

    # The first group outside the loop: most lookups have one group, or miss in the first.
    work, found = has(work, query.first)
    end = query.first + query.members
    work, (_, found) = loop(
        lambda c: (c[0] < end) & c[1], body, work, (query.first + 1, found), reads=("table",), writes=WRITES
    )
    return work, found
