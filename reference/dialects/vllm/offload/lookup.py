"""Longest prefix of a request that the second tier can complete, beyond what the GPU has of it.

Groups of full attention are asked for the chunks from the GPU's hit on, the others for the last ones that resuming at
the length found so far takes; whatever shortens it sends the search back. A chunk that is still being written counts,
but then the answer is to ask again later. vLLM 0.33 `OffloadingConnectorScheduler._lookup_complete_chunks`.
"""

from __future__ import annotations

from reference.dialects.vllm.offload.records import Group, Offloaded, Tier, is_ready, key_of
from reference.language import NOTHING, Text, clause

TEXT = Text(__name__)


def external_hit(t: Tier, request: Offloaded) -> int:
    """Tokens beyond a request's hit on the GPU that whole chunks complete; NOTHING for: ask again later."""
    limited = request.load_limit != NOTHING
    most = request.tokens
    if limited:
        most = min(most, request.local + request.load_limit)
    if t.config.groups > t.config.full:
        most -= 1
        if t.config.states > 0:
            most -= max(most, 0) % t.config.states
    found = longest(t, request, most, limited)
    if found != NOTHING and found > 0 and is_loading(t, request, request.local + found):
        clause("later-while-loading", "OffloadingConnectorScheduler._lookup", "others' loads end first")
        return NOTHING
    return found


def longest(t: Tier, request: Offloaded, most: int, limited: bool) -> int:
    """Tokens beyond the local hit at which every group can resume, `most` at most in all; NOTHING for: later."""
    clause("longest-hit", "OffloadingConnectorScheduler._lookup_complete_chunks")
    hit, later, settled, first = 0, False, 0, 0
    while first >= 0:
        again, windows = -1, False
        for at in range(first, t.config.groups):
            group = t.order[at]
            drops = group.eagle and not (settled >> group.index) & 1
            most, waits, dropped = of_group(t, request, group, most, limited, drops)
            if dropped:
                settled = settled | (1 << group.index)
            later = later or waits
            if most - request.local < group.chunk:
                return 0
            if most - request.local < hit:
                if not group.eagle:
                    settled = 0
                if later:
                    later, again = False, 0
                elif windows and again < 0:
                    again = t.config.full
            windows = windows or group.window > 0
            hit = most - request.local
        first = again
    return NOTHING if later else hit


def of_group(t: Tier, request: Offloaded, group: Group, most: int, limited: bool, drops: int) -> tuple[int, bool, int]:
    """Length at which one group can resume, `most` at most, 0 for none; whether that is to be seen later; whether a
    draft's group has given up its last chunk."""
    named = request.hashes // (group.chunk // t.config.unit)
    most = min(most, named * group.chunk)
    if limited:
        most -= max(most, 0) % group.chunk
    if most - request.local < group.chunk:
        return 0, False, False
    asked = min(most + group.chunk, named * group.chunk) if drops else most
    start, end = request.local // group.chunk, min(ceil(asked, group.chunk), named)
    if group.window == 0:
        count, waits = from_the_start(t, request, group, start, end)
    else:
        need = load_window(group, min(most, (end - int(drops)) * group.chunk))
        count, waits = from_the_end(t, request, group, start, end, group.window + int(drops), need + int(drops))
    if waits:
        return most, True, False
    if count == 0:
        return 0, False, False
    return min(most, (start + count - int(drops)) * group.chunk), False, drops


def from_the_start(t: Tier, request: Offloaded, group: Group, start: int, end: int) -> tuple[int, bool]:
    """Chunks up to the first that is absent; whether one of them is being written."""
    clause("from-the-start", "OffloadingConnectorScheduler._maximal_prefix_lookup")
    count, waits = 0, False
    for place in range(start, end):
        key = key_of(t, request, group.index, (place + 1) * group.chunk)
        if key.chunk == 0:
            break
        count += 1
        waits = waits or key.readers < 0
    return count, waits


def from_the_end(
    t: Tier, request: Offloaded, group: Group, start: int, end: int, window: int, first: int
) -> tuple[int, bool]:
    """End of the last run of `window` chunks that are there, of `first` where it is the very last one; whether one of
    the run is being written. A run that reaches the first chunk asked for counts whatever its length."""
    clause("from-the-end", "OffloadingConnectorScheduler._sliding_window_lookup")
    run, need, waits = 0, first, False
    for place in range(end - 1, start - 1, -1):
        key = key_of(t, request, group.index, (place + 1) * group.chunk)
        if key.chunk == 0:
            run, need, waits = 0, window, False
        else:
            run += 1
            waits = waits or key.readers < 0
            if run == need:
                return place + run - start, waits
    return run, waits


def load_window(group: Group, length: int) -> int:
    """Chunks that resuming at a length takes, which may end inside one (`load_window_size_in_chunks`)."""
    if group.span < 0:
        return group.window
    return max(group.window, ceil(group.span + ceil(length, group.chunk) * group.chunk - length, group.chunk))


def ceil(tokens: int, size: int) -> int:
    """Chunks or blocks that hold so many tokens."""
    return (tokens + size - 1) // size


def is_loading(t: Tier, request: Offloaded, end: int) -> bool:
    """True if a chunk is being loaded that a load up to a length reads, were nothing of it on the GPU."""
    for at in range(t.config.groups):
        group = t.groups[at + 1]
        last = min(ceil(end, group.chunk), request.hashes // (group.chunk // t.config.unit))
        first = request.local // group.chunk
        if group.window > 0:
            first = max(first, last - load_window(group, end))
        for place in range(first, last):
            if key_of(t, request, at, (place + 1) * group.chunk).loading:
                return True
    return False


def tail_hit(t: Tier, request: Offloaded, found: int) -> tuple[int, int]:
    """Tokens beyond the hit on the GPU that can be loaded, NOTHING for: later; and the tail's end where they end in
    one, else 0.

    The longest tail counts, after the whole chunks, `found` beyond the hit, or inside the block that follows them. A
    draft's tail is known by the prefix that proves it, which may take the chunk before the tail as well.
    """
    clause("tail-hit", "OffloadingConnectorScheduler._lookup")
    unit, size, local = t.config.unit, t.groups[1].chunk, request.local
    whole, proof = local + found, t.config.proof
    most = min(request.prompt, whole + size * (2 if proof > 0 else 1)) - 1
    most = min(most, request.hashes * unit - proof)
    if request.load_limit != NOTHING:
        most = min(most, local + request.load_limit)
    most -= max(most, 0) % unit
    beyond, later = (whole // size + 1) * size, False
    if most >= beyond:
        for at in range(t.config.groups):
            if not t.groups[at + 1].aligned:
                key = key_of(t, request, at, beyond)
                later = later or key.loading > 0
        for at in range(t.config.groups):
            if not t.groups[at + 1].aligned:
                key = key_of(t, request, at, beyond)
                if key.chunk == 0:
                    most = beyond - unit
                    break
                later = later or not is_ready(key)
    waits = later
    end = most
    while end > whole:
        there, absent = not (waits and end >= beyond), False
        for at in range(t.config.groups):
            key = key_of(t, request, at, end + t.groups[at + 1].proof)
            if key.chunk == 0:
                absent = True
                break
            there = there and is_ready(key)
        if there and not absent:
            return end - local, end
        later = later or not there
        end -= unit
    return (NOTHING if later and found == 0 else found), 0
