"""Loads of a compiled schedule with a second tier: requests that hold blocks and wait for what is loaded into them.

They hold slots, are listed apart from the queue, and come before it; once its load has ended, what was loaded for a
request is registered, and it runs as soon as its next tokens have blocks. The twin of
`hkv.dialects.vllm.schedule.tiered_replay`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from hkv.dialects.vllm.rules import admit
from hkv.dialects.vllm.rules.offload import lookup
from hkv.dialects.vllm.rules.offload.parameters import TierNumber
from hkv.dialects.vllm.rules.offload.words import LOADED, LOADS, SETTLED, SlotWord, User
from hkv.dialects.vllm.rules.parameters import CacheField
from hkv.dialects.vllm.rules.rows import Demand
from hkv.dialects.vllm.schedule.compiled_links import transferred
from hkv.dialects.vllm.schedule.compiled_reasons import DiagnosedTrace
from hkv.replay import schedule_loop
from hkv.replay.schedule_loop import Current
from hkv.replay.schedule_state import Ending, Machine, Mode, Number, Running
from hkv.state.loops import Scalar, loop, read
from hkv.state.state import Request

Pair = tuple[Any, Machine]


def choose(w: Any, trace: DiagnosedTrace, m: Machine) -> Pair:
    """Finds the request to be admitted next: one whose load has ended, else the head of the queue."""
    mine = m.at(Mode.ADMIT)
    can = mine & (m.budget > 0) & (m.active < trace.number(Number.MAX_RUNNING))
    spare = w.lists.shape[0] - 1

    def visit(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        visited, kept, place, slot, _ = carried
        v = v.write("lists", slot, place)
        slot = v.read("lists", visited)
        waits = v.read("tables", v.slot_word(slot, SlotWord.STATE)) == LOADS
        return v, (visited + waits, kept + waits, jnp.where(waits, kept, spare), slot, ~waits)

    held = jnp.where(can, w.held, w.visited)
    start = (w.visited, w.kept, spare, 0, False)
    w, (visited, kept, place, slot, found) = loop(
        lambda c: (c[0] < held) & ~c[4], visit, w, start, reads=("tables",), writes=("lists",)
    )
    w = w.write("lists", slot, place).replace(visited=visited, kept=kept)
    slot = jnp.where(found, slot, w.spare_slot)
    columns = (Running.REQUEST, Running.COMPUTED, Running.TOKENS, Running.SHARED_BOUNDARY)
    places = [("running_words", w.running_word(slot, column)) for column in columns]
    w, (request, computed, tokens, shared_boundary, state) = w.peek_each(
        found, *places, ("tables", w.slot_word(slot, SlotWord.STATE))
    )
    new = schedule_loop.chunk(trace, request, tokens, shared_boundary, computed, m.budget)
    mode = jnp.where(new > 0, int(Mode.HELD), int(Mode.RECORD))
    mode = jnp.where(state == LOADED, int(Mode.SETTLE), mode)
    queue = m.waiting - (w.kept + w.held - w.visited) - w.aside
    waiting = m._replace(waiting=queue)
    w, chosen = schedule_loop.choose(w, trace, waiting.when(found, mode=int(Mode.BEGIN)))
    m = chosen._replace(waiting=m.waiting)
    return w, m.when(found, mode=mode, asked=slot, new=new)


def recall(w: Any, m: Machine) -> Pair:
    """No more requests are admitted in this step: those put aside are in front of the queue again, loads in order."""
    mine = m.at(Mode.RECORD)
    spare = w.lists.shape[0] - 1

    def move(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        at, place, slot = carried
        v = v.write("lists", slot, place)
        return v, (at + 1, w.kept + at - w.visited, v.read("lists", at))

    start = jnp.where(mine & (w.kept < w.visited), w.visited, w.held)
    w, (_, place, slot) = loop(lambda c: c[0] < w.held, move, w, (start, spare, 0), writes=("lists",))
    w = w.write("lists", slot, place)
    held = w.kept + w.held - w.visited
    w = w.replace(
        held=jnp.where(mine, held, w.held), visited=jnp.where(mine, 0, w.visited), kept=jnp.where(mine, 0, w.kept)
    )
    top = w.spare_request

    def push(v: Any, carried: tuple[Scalar, ...]) -> tuple[Any, tuple[Scalar, ...]]:
        left, stacked, place, request = carried
        v = v.write("stack", request, place)
        return v, (left - 1, stacked + 1, stacked, v.read("stack", top - left))

    count = jnp.where(mine, w.aside, 0)
    w, (_, stacked, place, request) = loop(lambda c: c[0] > 0, push, w, (count, m.stacked, top, 0), writes=("stack",))
    w = w.write("stack", request, place).replace(aside=w.aside - count)
    return w, m._replace(stacked=stacked)


def reserved(w: Any, view: Any, m: Machine, enabled: Scalar) -> tuple[Any, tuple[Scalar]]:
    """Blocks that requests on the way to their last token still need, loads among them."""
    count = jnp.where(enabled, m.active + w.kept, 0)
    length = view.whole(CacheField.MAX_MODEL_LEN)

    def one(v: Any, carried: tuple[Scalar, Scalar]) -> tuple[Any, tuple[Scalar, Scalar]]:
        at, total = carried
        runs = at < m.active
        v, (running,) = v.peek(runs, "order", at)
        v, (held,) = v.peek(~runs, "lists", at - m.active)
        slot = jnp.where(runs, running, held)
        words = (Running.COMPUTED, Running.TOKENS, Running.SCHEDULED, Running.CAME)
        v, (computed, tokens, scheduled, came) = v.peek(
            at >= 0, "running_words", *(v.running_word(slot, word) for word in words)
        )
        # Admitted in this very step, it has computed nothing yet.
        prefills = ~runs | (jnp.where(computed > 0, computed, scheduled) < came)
        whole = jnp.minimum(tokens, length)
        zero, no = jnp.int32(0), jnp.bool_(True)
        v, needed = admit.estimate(v, view, Demand(slot, whole, whole, computed, zero, zero, zero, no), prefills)
        return v, (at + 1, total + needed)

    writes = ("order", "lists", "running_words", *admit.WRITES)
    w, (_, total) = loop(lambda c: c[0] < count, one, w, (0, 0), writes=writes)
    return w, (total,)


def hold(w: Any, m: Machine, current: Current, enabled: Scalar) -> Pair:
    """The candidate waits with blocks for what is loaded into them; another slot takes the next candidate."""
    slot, spare = m.candidate, w.spare_request
    w = w.write_if(enabled, "lists", slot, w.kept)
    w = w.write_if(enabled, "running_words", m.hit, w.running_word(slot, Running.COMPUTED))
    w = w.set(jnp.where(enabled, slot, w.spare_slot), Request.COMPUTED, m.hit)
    first = enabled & (current.preemptions == 0)
    w = w.set_result(jnp.where(first, m.head, spare), hit=m.hit, admitted=m.step)
    w = w.set_result(
        jnp.where(enabled & ~first, m.head, spare),
        recomputed=current.recomputed + current.tokens,
        recovered=current.recovered + m.hit,
    )
    w = w.write_if(first, "nodes", w.external, w.node(w.user(current.request), User.LOADED))
    w, (next_slot,) = w.peek(enabled, "vacant", jnp.maximum(m.vacant - 1, 0))
    again = m.stacked > 0
    m = m.when(first, prompt_tokens=m.prompt_tokens + current.tokens, hit_tokens=m.hit_tokens + m.hit)
    w = w.replace(held=w.held + enabled, visited=w.visited + enabled, kept=w.kept + enabled)
    return w, m.when(
        enabled,
        mode=int(Mode.ADMIT),
        candidate_request=-1,
        taken=jnp.where(again, m.taken, m.head + 1),
        stacked=jnp.where(again, m.stacked - 1, 0),
        candidate=next_slot,
        vacant=m.vacant - 1,
    )


def go_on(w: Any, m: Machine, current: Current, enabled: Scalar) -> Pair:
    """A request runs whose prefix was loaded."""
    slot = current.slot
    w = w.write("order", slot, jnp.where(enabled, m.active, w.spare_slot))
    w = w.write_if(enabled, "running_words", m.new, w.running_word(slot, Running.SCHEDULED))
    w, (began,) = w.peek(enabled, "tables", w.slot_word(slot, SlotWord.BEGAN))
    w = w.write_if(enabled, "tables", 0, w.slot_word(slot, SlotWord.STATE))
    w = w.replace(load_steps=w.load_steps + jnp.where(enabled, m.step - began, 0), visited=w.visited + enabled)
    return w, m.when(enabled, mode=int(Mode.ADMIT), active=m.active + 1, waiting=m.waiting - 1, budget=m.budget - m.new)


def settle(w: Any, m: Machine, current: Current, enabled: Scalar) -> Pair:
    """Notes that what was loaded is registered; the last token of a request is computed in any case."""
    w = w.write_if(enabled, "tables", SETTLED, w.slot_word(current.slot, SlotWord.STATE))
    computed = current.computed - (current.computed == current.tokens)
    w = w.write_if(enabled, "running_words", computed, w.running_word(current.slot, Running.COMPUTED))
    w = w.set(jnp.where(enabled, current.slot, w.spare_slot), Request.COMPUTED, computed)
    return w, m.when(enabled, mode=int(Mode.ADMIT))


def leave(w: Any, m: Machine, current: Current, enabled: Scalar) -> Pair:
    """A request that was loaded for will never fit, and leaves its slot."""
    w = w.set_result(jnp.where(enabled, current.request, w.spare_request), ended=m.step, outcome=int(Ending.NEVER_FITS))
    w = w.write("vacant", current.slot, jnp.where(enabled, m.vacant, w.spare_slot))
    w = w.write_if(enabled, "tables", 0, w.slot_word(current.slot, SlotWord.STATE)).replace(visited=w.visited + enabled)
    return w, m.when(enabled, mode=int(Mode.ADMIT), vacant=m.vacant + 1, waiting=m.waiting - 1, ended=m.ended + 1)


def begin(w: Any, view: Any, trace: DiagnosedTrace, step: Scalar, current: Current, enabled: Scalar) -> Any:
    """The load that a request waits for."""
    tier, slot, external = view.tier, current.slot, w.external
    of = view.prefix_of(current.request)
    w, count = lookup.load(w, view, slot, of, w.local, w.local + external, enabled)
    w, end = transferred(w, tier, "load", step, count, enabled)
    for word, value in ((SlotWord.END, end), (SlotWord.STATE, LOADS), (SlotWord.BEGAN, step)):
        w = w.write_if(enabled, "tables", value, w.slot_word(slot, word))
    slower = (
        enabled & (tier.number(TierNumber.SLOWER) != 0) & (external <= read(tier.beaten, jnp.where(enabled, count, 0)))
    )
    return w.replace(
        loads=w.loads + enabled,
        slower=w.slower + slower,
        loaded_tokens=w.loaded_tokens + jnp.where(enabled, external, 0),
        load_chunks=w.load_chunks + jnp.where(enabled, count, 0),
    )
