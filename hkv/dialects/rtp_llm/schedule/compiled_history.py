"""History of each key, and reasons why hits ended, compiled: the twins of `KeyHistory` and of `RtpDiagnosis`."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.rtp_llm.explain.key_history import EVICTED, NEVER_SEEN, UNFINISHED
from hkv.dialects.rtp_llm.rules.parameters import CacheField, GroupField, View
from hkv.dialects.rtp_llm.schedule.compiled_state import INSERTED, RtpScheduleWorkspace, group_bit
from hkv.dialects.rtp_llm.schedule.record import REASONS
from hkv.replay.reasons import CACHING_OFF, NOT_SHARED, RETIRED, WAITING, WHOLE_PROMPT
from hkv.replay.schedule_state import FATE, Arriving, Number, Trace
from hkv.state.loops import Scalar, divide, loop, peek, read, when

WHOLE, NEVER, RUNNING, GONE, SKIPPED, ELSEWHERE, UNSHARED, OFF = (
    REASONS.index(reason)
    for reason in (
        WHOLE_PROMPT,
        NEVER_SEEN,
        UNFINISHED,
        EVICTED,
        RETIRED,
        WAITING,
        NOT_SHARED,
        CACHING_OFF,
    )
)

Work = RtpScheduleWorkspace


def use(work: Work, view: View, trace: Trace, request: Scalar, change: Scalar) -> Work:
    """Notes that a request got blocks, or gave them back.

    Args:
      work: needs `history` to write.
      view: the configuration.
      trace: the requests.
      request: its number in the trace.
      change: 1, -1, or 0 for nothing to do.
    """
    length = trace.request(request, Arriving.PROMPT) + trace.request(request, Arriving.OUTPUT)
    start = trace.request(request, Arriving.KEY_START)
    end = jnp.where(change != 0, divide(length, view.whole(CacheField.BLOCK)), -1)

    def body(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        place, key, users = local
        w = w.write("history", users + change, w.users(key))
        inside = place < end
        key = jnp.where(inside, read(trace.keys, start + jnp.where(inside, place, 0)), w.spare_key)
        return w, (place + 1, key, w.read("history", w.users(key)))

    return loop(lambda c: c[0] <= end, body, work, (0, work.spare_key, 0), writes=("history",))[0]


def enter(work: Work, view: View, slot: Scalar, keys: Scalar, enabled: Scalar) -> tuple[Work, tuple[Scalar, Scalar]]:
    """Notes what entering a request's whole blocks will change; asked right before.

    Args:
      work: needs `rows`, `chains`, `requests`, `items` and `history` to write; only `history` is changed.
      view: the configuration.
      slot: the request.
      keys: its whole keys.
      enabled: whether to do it.

    Returns:
      The workspace, how many blocks the cache will take, and how many it will not because another one is there.
    """
    groups = view.num_groups
    names = ("rows", "chains", "requests", "items", "history")

    def one(w: Work, local: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
        position, taken, twice = local
        w, (key,) = peek(
            position >= 0, lambda v: (v.read("chains", v.chain(slot, 0) + position),), w, ("chains",), (0,)
        )

        def look(v: Work, at: tuple[Scalar, ...]) -> tuple[Work, tuple[Scalar, ...]]:
            group, bits, new, other = at
            inside = position < v.read("requests", v.length(slot, 0, group))
            block = v.read("rows", v.row(slot, 0, group) + jnp.where(inside, position, 0))
            mine = inside & (block != 0)
            cached = v.read("items", v.cached(key, group))
            new = new + (mine & (cached == 0) & view.flag(group, GroupField.REUSE))
            other = other + (mine & (cached != 0) & (cached != block))
            return v, (group + 1, bits | jnp.where(mine, group_bit(group), 0), new, other)

        start = (0, INSERTED, taken, twice)
        w, (_, bits, taken, twice) = loop(lambda c: c[0] < groups, look, w, start, reads=("rows", "requests", "items"))
        w, (past,) = peek(position >= 0, lambda v: (v.read("history", v.past(key)),), w, ("history",), (0,))
        return w.write("history", past | bits, w.past(key)), (position + 1, taken, twice)

    end = jnp.where(enabled, keys, 0)
    work, (_, taken, twice) = loop(lambda c: c[0] < end, one, work, (0, 0, 0), writes=names)
    return work, (taken, twice)


class _Search(NamedTuple):
    """A prefix: where its keys begin in the trace, and how many are looked for."""

    start: Scalar
    count: Scalar

    def key(self, trace: Trace, place: Scalar) -> Scalar:
        """One of its keys, the first where there is none of that number."""
        inside = (place >= 0) & (place < self.count)
        return read(trace.keys, self.start + jnp.where(inside, place, 0))


def diagnose(work: Work, view: View, trace: Trace, request: Scalar, tokens: Scalar, enabled: Scalar) -> Work:
    """Writes one reason a group to the request's fate, before it asks for its blocks.

    Args:
      work: needs `items`, `history` and `fates` to write; only `fates` is changed.
      view: the configuration.
      trace: the requests, and whether anything is cached.
      request: its number in the trace.
      tokens: tokens it has.
      enabled: whether to do it.
    """
    names = ("items", "history", "fates")
    caching = trace.number(Number.CACHING) != 0
    count = jnp.where(caching, divide(jnp.maximum(tokens - 1, 0), view.whole(CacheField.BLOCK)), 0)
    search = _Search(trace.request(request, Arriving.KEY_START), count)

    def body(w: Work) -> Work:
        w, hit = _longest(w, view, trace, search)
        key = search.key(trace, hit)

        def name(v: Work, local: tuple[Scalar]) -> tuple[Work, tuple[Scalar]]:
            (group,) = local
            v, (past, users, block) = peek(
                group >= 0,
                lambda u: (
                    u.read("history", u.past(key)),
                    u.read("history", u.users(key)),
                    u.read("items", u.cached(key, group)),
                ),
                v,
                ("history", "items"),
                (0, 0, 0),
            )
            reason = jnp.where(users > 0, RUNNING, NEVER)
            reason = jnp.where((past & INSERTED) != 0, SKIPPED, reason)
            reason = jnp.where((past & group_bit(group)) != 0, GONE, reason)
            reason = jnp.where(block != 0, ELSEWHERE, reason)
            reason = jnp.where(hit >= count, WHOLE, reason)
            shared = view.flag(group, GroupField.FULL) | view.flag(group, GroupField.VOTES)
            reason = jnp.where(caching, jnp.where(shared, reason, UNSHARED), OFF)
            return v.write("fates", reason, v.fate(request, FATE + group)), (group + 1,)

        return loop(lambda c: c[0] < view.num_groups, name, w, (0,), writes=names)[0]

    return when(enabled, body, work, writes=names)


def _longest(work: Work, view: View, trace: Trace, search: _Search) -> tuple[Work, Scalar]:
    """The longest prefix that all groups have, in keys: full groups all of it, others that vote its last."""

    def have(w: Work, place: Scalar, field: GroupField) -> tuple[Work, Scalar]:
        key = search.key(trace, place)

        def ask(v: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
            group, all_have = local
            return v, (group + 1, all_have & (~view.flag(group, field) | (v.read("items", v.cached(key, group)) != 0)))

        w, (_, agreed) = loop(lambda c: (c[0] < view.num_groups) & c[1], ask, w, (0, True), reads=("items",))
        return w, agreed

    def forward(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        w, agreed = have(w, local[0], GroupField.FULL)
        return w, (local[0] + agreed, agreed)

    def back(w: Work, local: tuple[Scalar, Scalar]) -> tuple[Work, tuple[Scalar, Scalar]]:
        w, agreed = have(w, local[0] - 1, GroupField.VOTES)
        return w, (jnp.where(agreed, local[0], local[0] - 1), agreed)

    work, (longest, _) = loop(lambda c: (c[0] < search.count) & c[1], forward, work, (0, True), writes=("items",))
    work, (longest, _) = loop(lambda c: (c[0] > 0) & ~c[1], back, work, (longest, False), writes=("items",))
    return work, longest
