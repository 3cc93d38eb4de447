"""The hit rule: the longest prefix that every group has in the cache, found by scanning back from the full groups' hit.

RTP-LLM's joint reuse in `initMallocForCommonLen`. Full groups need a block under every key, and are walked from the
left; the shortest of their runs is a candidate. A window or a state needs the block under the candidate's last key
alone: if it is missing from one, the candidate is a key shorter. Looking counts as use, so that the order of
looking shows in what is evicted later.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.rules import prefix_tree
from hkv.dialects.rtp_llm.rules.parameters import CacheField, GroupField, RtpView, canonical_place
from hkv.state import role_counts
from hkv.state.loops import Scalar, divide, fori_loop, loop, peek
from hkv.state.pooled import Role
from hkv.state.pooled_workspace import PooledWorkspace

WRITES = ("rows", "requests", "chains", "items", *role_counts.WRITES, *prefix_tree.WRITES)
"""Arrays that the rule writes; `chains` only in its spare element."""


class Keys(NamedTuple):
    """The keys that are looked for: how many, and of a sequence's keys every so many-th."""

    slot: Scalar
    count: Scalar
    stride: Scalar


def adopt(
    work: PooledWorkspace, view: RtpView, slot: Scalar, keys: Scalar, enabled: Scalar
) -> tuple[PooledWorkspace, Scalar]:
    """Takes over what is cached under all keys but the last, into the empty lists of a request's first sequence, if
    `enabled`.

    Full groups want a block under every key, and vote even if their policy forbids reuse. Of the others only the last
    key counts: LINEAR groups always vote, SWA groups if their policy allows reuse. Looking counts as using. Returns how
    many keys were hit; under context parallelism, of virtual blocks.
    """
    stride = view.whole(CacheField.RANKS)
    # Never the last key, even if it is that of a full block: something must be left to compute.
    count = jnp.where(enabled, jnp.maximum(divide(keys, stride) - 1, 0), 0)
    asked = Keys(slot, count, stride)
    work, longest = _full_groups(work, view, asked)
    work, hit = _scan_back(work, view, asked, longest)
    return _take_over(work, view, asked, hit), hit


def _key(work: PooledWorkspace, asked: Keys, place: Scalar) -> Scalar:
    return work.read("chains", work.chain(asked.slot, 0) + canonical_place(place, asked.stride))


def _full_groups(work: PooledWorkspace, view: RtpView, asked: Keys) -> tuple[PooledWorkspace, Scalar]:
    """The shortest run of keys, from the first on, that a full group has; its blocks are written to the lists."""
    writes = ("rows", "chains", "items", *prefix_tree.WRITES)

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        group, shortest = local
        row = w.row(asked.slot, 0, group)

        def step(v: PooledWorkspace, at: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
            place, _ = at
            v, (key,) = peek(place >= 0, lambda u: (_key(u, asked, place),), v, ("chains",), (0,))
            # Looking counts as use, also beyond what will be adopted: RTP-LLM's `match` touches what it finds, and
            # the order of eviction shows it.
            v, block = prefix_tree.find(v, place >= 0, key, group)
            v = v.write("rows", block, row + place)
            return v, (place + (block != 0), block != 0)

        full = view.flag(group, GroupField.FULL)
        end = jnp.where(full, asked.count, 0)
        w, (run, _) = loop(lambda c: (c[0] < end) & c[1], step, w, (0, True), writes=writes)
        # Each full group looks up to the end, not up to the shortest run: it has touched as many keys as in RTP-LLM.
        return w, (group + 1, jnp.where(full, jnp.minimum(shortest, run), shortest))

    groups = jnp.where(asked.count > 0, view.num_groups, 0)
    work, (_, shortest) = loop(lambda c: c[0] < groups, one, work, (0, asked.count), writes=writes)
    return work, shortest


def _scan_back(work: PooledWorkspace, view: RtpView, asked: Keys, longest: Scalar) -> tuple[PooledWorkspace, Scalar]:
    """The longest run, not longer than that, whose last key all other groups that vote have."""
    groups = view.num_groups

    def one(w: PooledWorkspace, local: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
        run, _ = local
        w, (key,) = peek(run > 0, lambda v: (_key(v, asked, run - 1),), w, ("chains",), (0,))

        def vote(v: PooledWorkspace, at: tuple[Scalar, Scalar]) -> tuple[PooledWorkspace, tuple[Scalar, Scalar]]:
            group, agreed = at
            # A window or a state needs the block under the last key alone, so that one look for each candidate
            # suffices.
            votes = view.flag(group, GroupField.VOTES)
            v, block = prefix_tree.find(v, votes, key, group)
            return v, (group + 1, agreed & (~votes | (block != 0)))

        w, (_, agreed) = loop(lambda c: c[0] < groups, vote, w, (0, True), writes=("items", *prefix_tree.WRITES))
        return w, (jnp.where(agreed, run, run - 1), agreed)

    writes = ("chains", "items", *prefix_tree.WRITES)
    work, (run, _) = loop(lambda c: (c[0] > 0) & ~c[1], one, work, (longest, False), writes=writes)
    return work, run


def _take_over(work: PooledWorkspace, view: RtpView, asked: Keys, hit: Scalar) -> PooledWorkspace:
    """Full groups keep their hits; the others get holes, and at the end the block under the last key."""
    work, (last,) = peek(hit > 0, lambda w: (_key(w, asked, hit - 1),), work, ("chains",), (0,))

    def one(group: Scalar, w: PooledWorkspace) -> PooledWorkspace:
        full, votes = view.flag(group, GroupField.FULL), view.flag(group, GroupField.VOTES)
        pool, row = view.pool_of(group), w.row(asked.slot, 0, group)
        spread = ~full & ~view.flag(group, GroupField.COMPACT)
        length = hit * jnp.where(spread, asked.stride, 1)
        w, (cached,) = w.peek(votes, "items", w.cached(last, group))

        def place(position: Scalar, v: PooledWorkspace) -> PooledWorkspace:
            v, (found,) = v.peek(full, "rows", row + position)
            block = jnp.where(full, found, jnp.where(position == length - 1, cached, 0))
            v = role_counts.reference(v, block != 0, pool, block, jnp.int32(Role.REQUEST))
            return v.write("rows", block, row + position)

        w = fori_loop(0, length, place, w, writes=("rows", *role_counts.WRITES))
        return w.write("requests", length, w.length(asked.slot, 0, group))

    end = jnp.where(hit > 0, view.num_groups, 0)
    return fori_loop(0, end, one, work, writes=("rows", "requests", "items", *role_counts.WRITES))
