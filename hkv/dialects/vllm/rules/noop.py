"""Tokens that a running request can grow by before an allocation has anything to do for it but to say yes.

Most allocations of a decoding request fall inside a block: they take nothing, register nothing and retire nothing in
any group. The number of tokens for which that holds is noted when an allocation did do something, and spares the next
ones all loops over groups. What is noted may be too little, never too much.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from hkv.dialects.vllm.rules import reads
from hkv.dialects.vllm.rules.hit import resumable
from hkv.dialects.vllm.rules.parameters import READ_FIELDS, CacheField, GroupField, View
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.state.loops import Scalar, loop
from hkv.state.state import Request, Row
from hkv.state.workspace import Workspace


class _Known(NamedTuple):
    """Lengths of a request, in tokens: its prompt, its length, and what was computed before."""

    prompt: Scalar
    tokens: Scalar
    computed: Scalar


def note(work: Workspace, view: View, slot: Scalar, enabled: Scalar) -> Workspace:
    """Notes up to how many tokens, lookahead ones included, nothing will be to do for a request that was just granted
    blocks."""

    def bound(w: Workspace, local: tuple[Scalar, ...]) -> tuple[Workspace, tuple[Scalar, ...]]:
        group, least = local
        w, (length, first, cached, partial, exported) = w.peek_row(
            group >= 0, slot, group, Row.LENGTH, Row.FIRST, Row.CACHED, Row.PARTIAL, Row.EXPORT
        )
        block, ring = view.group(group, GroupField.BLOCK), view.group(group, GroupField.ONE_BLOCK) != 0
        # Neither a ring nor an encoder's blocks grow with the request's tokens.
        ring = ring | (view.group(group, GroupField.ENCODER) != 0)
        held = (length - view.group(group, GroupField.SCRATCH)) * block
        held = jnp.where(ring, UNLIMITED, jnp.minimum(held, _unexported(view, group, exported, known)))
        filled = jnp.where(
            view.group(group, GroupField.CACHEABLE) != 0, _unregistered(view, group, cached, known), UNLIMITED
        )
        # A block is to be copied before the next write: there is something to do.
        filled = jnp.where(partial > 0, 0, filled)
        numbers = (view.group(group, each) for each in READ_FIELDS)
        kept = reads.last_query((jnp.maximum(first, view.group(group, GroupField.SINKS)) + 1) * block, *numbers)
        # An allocation asks for a token more than were computed, unless it is cut off at the longest request.
        kept += kept + 1 < view.whole(CacheField.MAX_MODEL_LEN)
        # The nearest of three: a new block is needed, a block is full and registered, a block leaves the window.
        return w, (group + 1, jnp.minimum(least, jnp.minimum(held, jnp.minimum(filled, kept))))

    fields = (Request.PROMPT, Request.TOKENS, Request.COMPUTED)
    work, values = work.peek_request(enabled, slot, *fields)
    known = _Known(*values)
    groups = jnp.where(enabled, view.num_groups, 0)
    work, (_, least) = loop(lambda c: c[0] < groups, bound, work, (0, UNLIMITED), reads=("requests",))
    place = jnp.where(enabled, slot, work.spare_slot)
    return work.set(place, Request.NOOP_UNTIL, least)


def _unregistered(view: View, group: Scalar, cached: Scalar, known: _Known) -> Scalar:
    """Tokens up to which a group registers nothing.

    A state may be due where exactly so many tokens may be registered. An allocation registers one token more than are
    computed, or all that the request has, rounded down (`hkv.dialects.vllm.rules.register.cacheable_tokens`): if that
    is beyond the state's place, none will be due any more.
    """
    block = view.group(group, GroupField.BLOCK)
    tail = view.group(group, GroupField.TAIL)
    end = resumable(view, known.prompt, view.whole(CacheField.HASH_BLOCK))
    least = jnp.minimum(known.computed + 1, known.tokens) - view.whole(CacheField.REPREFILLABLE)
    passed = least - view.whole(CacheField.REGISTRATION_ALIGNMENT) >= end
    before = jnp.where(passed, UNLIMITED, end - 1)
    before = jnp.where((view.whole(CacheField.SHARED_BOUNDARIES) != 0) & (known.computed < known.prompt), 0, before)
    before = jnp.where(tail == 2, before, jnp.where(tail == 1, 0, UNLIMITED))
    # One token less than fills the next block.
    return jnp.minimum((cached + 1) * block - 1, before)


def _unexported(view: View, group: Scalar, exported: Scalar, known: _Known) -> Scalar:
    """Tokens up to which a chunk leaves no state behind: it must span two ends of columns; none while one is noted."""
    block = view.group(group, GroupField.BLOCK)
    unexported = jnp.where(view.group(group, GroupField.EXPORT_STEP) > 0, known.computed + block, UNLIMITED)
    return jnp.where(exported > 0, 0, unexported)
