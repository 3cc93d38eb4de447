"""The longest prefix that every group can resume from: one group alone, or several until they agree.

After vLLM 0.33 `find_longest_cache_hit` of the managers of each kind, and of `UnitaryKVCacheCoordinator` and
`HybridKVCacheCoordinator`.
"""

from __future__ import annotations

from reference.dialects.vllm.cases import of_lookup
from reference.dialects.vllm.pool import entry_of, tell_key, tell_stored
from reference.dialects.vllm.records import UNBOUNDED, Cache, Failure, Group, Kind, Request, Result, ceil
from reference.language import Text, clause

TEXT = Text(__name__)


def have(c: Cache, request: Request, group: Group, at: int, column: int) -> bool:
    """True if a group has the block of a key, and those of its spec with it: their rows take it."""
    if not c.config.twins:
        block = entry_of(c, request, group, at).first
        if block is None:
            return False
        request.rows[group.place].blocks[column] = block
        return True
    twin = group
    while twin is not None:
        block = entry_of(c, request, twin, at).first
        if block is None:
            return False
        request.rows[twin.place].blocks[column] = block
        twin = twin.twin
    return True


def find(c: Cache, request: Request, group: Group, most: int, drop: int) -> int:
    """The longest prefix, of at most `most` tokens, from which a group can resume; its row takes the blocks.

    Full attention needs every block from the first on, then as many tokens of the next as are known. Of a window, the
    last run of enough blocks counts, or a shorter one from the first block on; a state stands for its length alone; of
    chunks, those before the last are not looked at. A group that is to drop a block looks for one more.
    """
    row, size, scale, kind = request.rows[group.place], group.size, group.scale, group.kind
    limit, known = most // size, request.keys // scale
    columns = min(limit, known)
    fine = c.config.partial and group.fine
    start, stop, bottom, top = 0, 0, 0, columns
    if kind == Kind.FULL:
        stop = columns
    if c.config.runs:
        if kind == Kind.CHUNK:
            start, stop = most // group.unit * group.unit // size, columns
        if kind == Kind.SINKS:
            stop = min(columns, group.sinks)
    whole = start
    while whole < stop:
        there = have(c, request, group, (whole + 1) * scale - 1, whole)
        if not there:
            break
        whole += 1
    # From the end on: a run of blocks, a state, or what a partly filled block holds after the whole ones.
    step, least, gives = 1 if fine else scale, 1, 0
    if fine:
        top = min(most // c.config.hash, request.keys)
    if kind == Kind.FULL:
        bottom = whole * scale
        top = min(top, bottom + scale - 1) if fine else bottom
    if kind == Kind.WINDOW:
        gives = drop
        least = group.need + drop
        if c.defects.window_one_never_hits:
            clause("window-one-never-hits", "SlidingWindowManager", "defect: a window of one token wants a block")
            least = max(least, 1)
    if c.config.runs:
        if kind == Kind.CHUNK:
            top = 0
        if kind in (Kind.PAIR, Kind.SINKS):
            gives = drop
            least = min(group.need + drop, 1)
        if kind == Kind.SINKS and whole < group.sinks:
            top = whole
    align = size * group.steps
    run, at = 0, top
    while at > bottom and run < least:
        at -= 1
        there = have(c, request, group, (at + 1) * step - 1, at // scale if c.config.parts > 1 and step < scale else at)
        if not there:
            run = 0
            if c.config.runs and kind != Kind.WINDOW:
                least = 1
        elif run > 0 or fine or (at + 1 - gives) % group.steps == 0:
            run += 1
            if c.config.runs and run == 1 and kind in (Kind.PAIR, Kind.SINKS):
                length = (at + 1 - drop) * size
                least = at + 1 - max(0, length // group.unit * group.unit - group.lookback) // size
    row.first_found = at // scale if fine else at
    if kind == Kind.FULL:
        row.first_found = 0
    if c.config.runs and kind == Kind.CHUNK:
        row.first_found = start
    if c.defects.finder_index_error:
        c.failed = outruns(c, group, limit, known, whole, least, fine)
    if kind == Kind.FULL:
        length = (at + 1) * c.config.hash if run > 0 else whole * size
        if fine:
            align = c.config.hash
        if drop and length > 0:
            length -= min(align, size)
        return length // align * align
    if kind == Kind.STATE:
        return (at + run) * step * c.config.hash if run > 0 else 0
    if c.config.runs and kind == Kind.CHUNK:
        return whole * size
    end = at + run
    if run < least or least == 0:
        end = end // group.steps * group.steps
    if gives and end > 0:
        end -= 1
        if kind == Kind.WINDOW:
            end = end // group.steps * group.steps
    return end * size


def outruns(c: Cache, group: Group, limit: int, known: int, whole: int, least: int, fine: int) -> int:
    """KEYS where a finder looks at a key beyond the last, as vLLM's do; else what has failed so far."""
    clause("finder-index-error", "find_longest_cache_hit", "defect: finders look at keys that do not exist")
    looks = (
        (group.kind == Kind.WINDOW and least > 0) or group.kind == Kind.PAIR or (group.kind == Kind.STATE and not fine)
    )
    if group.kind == Kind.CHUNK:
        looks = whole >= known and whole < limit
    return Failure.KEYS if looks and limit > known else c.failed


def longest_hit(c: Cache, request: Request, most: int, each: int) -> tuple[int, int]:
    """The longest prefix, of at most `most` tokens, that every group can resume from, and the longest that one can;
    with `each`, every group is asked by itself.

    Each group in turn shortens the candidate, in rounds until none does; a prefix of a hit of full attention is one,
    too, so that it is asked once. Under the EAGLE drop a group looks one block beyond, and drops once for each
    candidate: a group that shortens it makes the others drop anew.
    """
    hit, longest, dropped, rounds, going = most, 0, 0, 0, c.config.finders > 0
    if not going:
        hit = 0
    while going:
        candidate = hit
        for n in range(c.config.finders):
            group = c.order[n]
            row = request.rows[group.place]
            if rounds > 0 and group.kind == Kind.FULL:
                candidate = min(candidate, row.reach)
            else:
                drop, length = 0, hit if each else candidate
                if c.config.eagle and group.drops and (each or dropped >> n & 1 == 0):
                    clause("drop", "HybridKVCacheCoordinator.find_longest_cache_hit", "a group gives up its last block")
                    drop, dropped = 1, dropped | 1 << n
                    if group.kind != Kind.STATE and not c.config.alone:
                        margin = c.config.hash if c.config.partial and group.fine else group.size
                        length = min(length + margin, request.keys * c.config.hash)
                length = find(c, request, group, length, drop)
                if drop == 0 and length < candidate:
                    dropped = 0
                row.reach, candidate = length, length
                longest = max(longest, length)
        rounds += 1
        going = candidate < hit and not c.config.once and not each
        hit = min(hit, candidate)
    return hit, longest


def look_up(c: Cache, request: Request, result: Result, most: int, connects: int) -> int:
    """The hit of a waiting request, which it may adopt: of at most `most` tokens; for a connector, what full attention
    has, whatever other groups lack of it, unless one of them finds more."""
    hit, longest, completed = 0, 0, False
    for each in range(connects, -1, -1):
        hit, longest = longest_hit(c, request, most, each)
        least, best = UNBOUNDED, 0
        for g in range(1, c.config.width + 1):
            group, row = c.groups[g], request.rows[g]
            lead = request.rows[group.leader.place]
            reach = (lead.reach if each else hit) if group.cached else 0
            row.first_found, row.found = lead.first_found, ceil(reach, group.size)
            if each:
                result.own[g] = reach
                least, best = min(least, reach), max(best, reach)
        if each and c.config.completed:
            whole = result.own[c.order[0].place]
            if best <= whole:
                clause("connector/completed", "KVCacheManager.get_computed_blocks_for_connector")
                hit, longest, result.lags, completed = whole, 0, least < whole, True
                break
    result.value = hit
    if longest > hit and not c.config.alone:
        clause(
            "hit/shared-prefix",
            "HybridKVCacheCoordinator.find_longest_cache_hit",
            "the search for the hit came to more, which a later group shortened",
        )
        result.longer = longest
    if c.config.explains:
        of_lookup(c, request, hit, result.longer)
    if c.config.events and request.reports and hit > 0 and not completed:
        report(c, request, hit)
    return hit


def report(c: Cache, request: Request, hit: int) -> None:
    """Events as though a request had stored the blocks of its hit; what it ends inside has one of its own, as its
    registration had (`kv_cache_report_mode`)."""
    clause("hit/reported", "KVCacheCoordinator.emit_cached_block_events")
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        size, count, hashes, columns = group.size, 0, group.scale, hit // group.size
        if c.defects.hit_reported_by_columns:
            clause("hit-reported-by-columns", "BlockPool.emit_cached_block_events", "defect: every column is named")
            size, columns = group.spec_size, row.found
            hashes = size // c.config.hash
            if row.found > 0 and (size % c.config.hash > 0 or columns * size > request.keys * c.config.hash):
                c.failed = Failure.SIZE
                columns = 0
        for column in range(columns if row.found > 0 else 0):
            there = column >= row.first_found or column < group.sinks
            if c.defects.hit_reported_by_columns or (there and row.blocks[column] is not None):
                count += 1
                tell_key(c, entry_of(c, request, group, (column + 1) * hashes - 1))
        if count > 0:
            tell_stored(c, request, group, 0, columns * size, size)
        inside = hit % group.size > 0 and row.found > columns and not c.defects.hit_reported_by_columns
        if inside and columns >= row.first_found and row.blocks[columns] is not None:
            tell_key(c, entry_of(c, request, group, hit // c.config.hash - 1))
            tell_stored(c, request, group, hit - c.config.hash, hit, c.config.hash)
