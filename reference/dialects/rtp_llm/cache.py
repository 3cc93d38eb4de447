"""The prefix cache of all groups: under each key a block for each group that has one, in order of use.

A cached block has a reference of the cache in its group's pool. What evicts gives it back.
"""

from __future__ import annotations

from reference.dialects.rtp_llm.pools import refer
from reference.dialects.rtp_llm.records import Cache, Group, Key, Request, Role, Sequence
from reference.dialects.rtp_llm.tree import enter_name, remove_names, use_name
from reference.language import Text, clause

TEXT = Text(__name__)


def match(c: Cache, key: Key, group: Group) -> int:
    """A group's block under a key, or 0. The key counts as used even if the group has none."""
    clause("match", "SharedBlockCache::match")
    if not key.cached:
        return 0
    use(c, key)
    if c.config.tree:
        for canonical in range(2):
            if key.names[canonical].present:
                use_name(c, key.names[canonical])
    return key.blocks[group.at]


def use(c: Cache, key: Key) -> None:
    """A cached key is the most recently used."""
    c.recent.remove(key)
    c.recent.put(key)


def remove(c: Cache, key: Key) -> None:
    """Takes a key and all its names out; its blocks and their references are the caller's."""
    clause("remove-key", "SharedBlockCache::remove")
    key.cached = 0
    c.recent.remove(key)
    if c.config.tree:
        remove_names(c, key)


def put(
    c: Cache, row: Sequence, at: int, first: int, last: int, key: Key, parent: Key, canonical: int, resident: int
) -> None:
    """Enters a sequence's blocks of groups from `first` to before `last` under a key. Only holes are filled.

    Residence stays once it is there, and a dependency among virtual blocks is not replaced by one of another namespace.
    """
    clause("put", "SharedBlockCache::put")
    changed = not key.cached
    if changed:
        key.resident, key.canonical = 0, 0
    else:
        c.recent.remove(key)
    c.recent.put(key)
    if resident and not key.resident:
        clause("resident", "SharedBlockCache::put", "a key stays for good")
        key.resident, changed = 1, True
    for g in range(first, last):
        block = lent(c, row, at, g) if key.blocks[g] == 0 else 0
        if block > 0:
            key.blocks[g], changed = block, True
        refer(c, c.groups[g + 1].pool, block, Role.CACHE)
    ordinal = 0 if c.config.single else at
    if not key.cached or canonical or not key.canonical:
        differs = key.canonical != canonical or key.ordinal != ordinal or key.parent is not parent
        changed = changed or differs
        key.canonical, key.ordinal, key.parent = canonical, ordinal, parent
    key.cached = 1
    if changed or key.resident:
        c.version += 1
    if c.config.tree:
        enter_name(c, key, canonical, parent)


def lent(c: Cache, row: Sequence, at: int, g: int) -> int:
    """A sequence's block in a group that others may reuse; 0 for none."""
    if c.groups[g + 1].reuse and at < row.groups[g].length:
        return row.groups[g].blocks[at]
    return 0


def insert(c: Cache, request: Request, resident: int) -> None:
    """Enters a request's whole blocks; the key of a partly filled one is dropped.

    Of one full group, the first sequence's, first to last, as roots of the tree. Of several, all sequences', last key
    first, so that a prefix's first keys are the last to be evicted. Where ranks share a sequence they go group by
    group, dealt ones under canonical keys, and the last token is always left out.
    """
    clause("insert", "KVCacheAllocator::insertIntoCache")
    partly = False
    for r in range(request.batch):
        partly = partly or not request.rows[r].aligned
    for r in range(request.batch if partly else 0):
        clause("drop-last-partial", "dropLastPartialBlock", "the key of a partly filled block is dropped")
        request.rows[r].count, request.rows[r].aligned = max(request.rows[r].count - 1, 0), 1
    sharded = c.config.ranks > 1
    for r in range(1 if c.config.single else request.batch):
        row = request.rows[r]
        for turn in range(c.config.groups if sharded else 1):
            canonical, count, last = 0, row.count, c.config.groups
            if sharded:
                group, last = c.groups[turn + 1], turn + 1
                canonical = group.canonical
                count = whole_keys(c, row, canonical)
                count = min(count, max(request.tokens - 1, 0) // group.logical, row.groups[turn].length)
            for n in range(count - 1, -1, -1):
                at = count - 1 - n if c.config.single else n
                lends = False
                for g in range(turn, last):
                    lends = lends or lent(c, row, at, g) > 0
                if lends:
                    parent: Key = None  # type: ignore[assignment]
                    if at > 0 and not c.config.single:
                        parent = key_at(c, row, at - 1, canonical)
                    put(c, row, at, turn, last, key_at(c, row, at, canonical), parent, canonical, resident)


def whole_keys(c: Cache, row: Sequence, canonical: int) -> int:
    """Keys of a sequence in use; the canonical ones are those of whole virtual blocks."""
    return row.count // c.config.ranks if canonical else row.count


def key_at(c: Cache, row: Sequence, at: int, canonical: int) -> Key:
    """A key of a sequence; the last rank's is that of the virtual block, which covers them all."""
    return row.keys[(at + 1) * c.config.ranks - 1 if canonical else at]
