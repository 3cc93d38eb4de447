"""Ledgers, which count what the tree has, and free lists, which keep their order."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.sglang import log as structs
from reference.dialects.sglang.invariants.moment import Moment
from reference.dialects.sglang.invariants.pages import free_pages, may_lose, own_slots, page_sizes
from reference.dialects.sglang.invariants.register import INVARIANTS, TREE


@INVARIANTS.invariant("ledgers are sums", needs=TREE)
def ledgers_are_sums(moment: Moment) -> Iterator[str]:
    """Tokens that the tree counts as evictable and as protected are those of nodes that nobody holds, and that somebody
    does (`component_evictable_size_`, `component_protected_size_`)."""
    if moment.after.ledgers is None:
        return
    for component, (group, ledger) in enumerate(zip(moment.header.groups, moment.after.ledgers, strict=True)):
        sums = [0, 0]
        for node in moment.after.nodes:
            has = {structs.FULL_ATTENTION: node.slots, structs.SLIDING_WINDOW: node.window or ()}.get(group["kind"])
            sums[node.locks[component] > 0] += (node.state is not None) if has is None else len(has)
        if [ledger.evictable, ledger.protected] != sums:
            counted = f"{ledger.evictable} evictable and {ledger.protected} protected"
            yield f"{group['kind']}: {counted} are counted, and nodes have {sums[0]} and {sums[1]}"


@INVARIANTS.invariant("ledgers fill the pool")
def ledgers_fill_the_pool(moment: Moment) -> Iterator[str]:
    """Free, evictable and protected tokens and those of requests' own make up each pool: else the engine
    says "pool memory leak detected" (`_check_pool_invariant`)."""
    if moment.after.ledgers is None or moment.before.ledgers is None:
        return
    before, after = (_parts(moment, state) for state in (moment.before, moment.after))
    for pool, (then, now, loses) in enumerate(zip(before, after, may_lose(moment), strict=True)):
        size, total = page_sizes(moment)[pool], moment.header.num_blocks[pool]
        if not 0 <= sum(then) - sum(now) <= loses * size:
            named = zip(now, ("free", "evictable", "protected", "of requests"), strict=True)
            parts = ", ".join(f"{count} {name}" for count, name in named)
            kind = moment.header.groups[pool]["kind"]
            yield f"{kind} has {total * size}: {parts} are {sum(now)}, and were {sum(then)}"


def _parts(moment: Moment, state: structs.State) -> Iterator[list[int]]:
    """Tokens, or states, of each pool: free, evictable, protected, and of requests' own, these in whole pages."""
    for pool, (ledger, size) in enumerate(zip(state.ledgers or (), page_sizes(moment), strict=True)):
        kind, mapping = moment.header.groups[pool]["kind"], dict(state.window)
        own = {slot // size for request in state.requests.values() for slot in own_slots(request, kind, mapping)}
        free = size * len(free_pages(state.pools[pool]))
        yield [free, ledger.evictable, ledger.protected, size * len(own)]


@INVARIANTS.invariant("free lists keep their order")
def free_lists_keep_their_order(moment: Moment) -> Iterator[str]:
    """Pages are taken from the front; of one token, and states, they come back to the end, larger ones to the front.
    Where pages are sorted they wait, and all are in order of their numbers once they were taken back."""
    sizes = page_sizes(moment)
    for pool, (before, after) in enumerate(zip(moment.before.pools, moment.after.pools, strict=True)):
        states = moment.header.groups[pool]["kind"] == structs.STATES
        back = set(before.waiting).difference(after.waiting) or set(after.free).difference(before.free)
        if moment.config.need_sort and not states and back:
            if after.free != sorted(after.free):
                yield f"pages {after.free} of pool {pool} are taken back and not sorted"
            continue
        known = set(before.free)
        old, new = [page for page in after.free if page in known], [page for page in after.free if page not in known]
        # A state that was taken for a copy comes back where the tree had one already.
        unused = states and isinstance(moment.operation, structs.CheckpointOp)
        if old != before.free[len(before.free) - len(old) :] and not (
            unused and old == before.free[1:] + before.free[:1]
        ):
            gone = [page for page in before.free if page not in set(old)]
            yield f"pages {gone} of pool {pool} are taken, and {before.free[: len(gone)]} come first"
        expected = [*new, *old] if sizes[pool] > 1 else [*old, *new]
        if after.free != expected:
            yield f"freed pages {new} of pool {pool} come back at the {'end' if sizes[pool] > 1 else 'front'}"
