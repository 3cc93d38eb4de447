"""Rules of the cache: keys enter whole and once, leave in order, and none of a prefix outlives what it stands on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NULL, SINGLE
from hkv.dialects.rtp_llm.invariants.moment import RtpMoment, rtp_invariant

EVICTING = (structs.MallocOp, structs.ForkOp, structs.ExportOp, structs.EvictOp)
"""Operations that may take something out of the cache."""


@rtp_invariant("rtp key life", "B-I5", "B-I11")
def key_life(moment: RtpMoment) -> Iterator[str]:
    """Blocks enter by `insert` only, which never puts one in another's place; only operations that need room evict.

    Holds after every operation. No exception: a request that computes what is cached already keeps blocks that nobody
    finds.
    """
    if isinstance(moment.operation, structs.InsertOp):
        if moment.left:
            yield f"an insertion took {moment.left} away"
    elif moment.entered:
        yield f"{moment.entered} were entered"
    elif moment.left and not isinstance(moment.operation, EVICTING):
        yield f"{moment.left} left the cache"


@rtp_invariant("rtp insertion", "B-I27", "B-I30", "B-I31", after=(structs.InsertOp,))
def insertion(moment: RtpMoment) -> Iterator[str]:
    """Every whole block of a group with reuse is cached, under its own key and in its own group; no unfinished one is.

    Holds after `insert`: what is cached of a key is this block, or one that was there before. Exceptions: one group
    alone enters its first sequence only; under context parallelism nothing is judged but that blocks are the request's.
    """
    operation, config = moment.operation, moment.config
    assert isinstance(operation, structs.InsertOp)
    rows = moment.before.lists[operation.id]
    own = {(group, block) for row in rows for group, blocks in enumerate(row) for block in blocks}
    for (key, group), block in moment.entered.items():
        if (group, block) not in own:
            yield f"block {block} of group {group} was entered under {key}, and is not the request's"
    if config.cp_size > 1:
        return
    cached = moment.slots(moment.after)
    wanted: dict[tuple[int, int], set[int]] = {}
    for sequence, row in enumerate(rows if config.name != SINGLE else rows[:1]):
        keys = moment.ledger.keys(operation.id, sequence)
        for group, blocks in enumerate(row):
            if config.policies[group].enable_prefix_reuse:
                for key, block in zip(keys, blocks, strict=False):
                    if block != NULL:
                        wanted.setdefault((key, group), set()).add(block)
    for (key, group), blocks in wanted.items():
        if (key, group) not in cached:
            yield f"key {key} of group {group} is not cached, though {sorted(blocks)} are whole"
    for (key, group), block in moment.entered.items():
        if block not in wanted.get((key, group), ()):
            yield f"block {block} was entered under key {key} of group {group}, where the request has no whole block"


@rtp_invariant("rtp eviction", "B-I33", after=EVICTING)
def eviction(moment: RtpMoment) -> Iterator[str]:
    """A key leaves with all its blocks; resident keys never leave; without a tree the least recently used leave first.

    Holds after operations that may evict. `evict` and `export` take no more keys than are needed, and no fewer than
    there are. Exceptions: groups that may lose blocks alone; under a tree whole chains leave, so more than asked for.
    """
    if not moment.left:
        yield from _enough(moment)
        return
    kept = {key for key, _ in moment.after.cached}
    gone = [key for key, _ in moment.before.cached if key not in kept]
    for key, group in moment.left:
        if key in moment.ledger.resident and group not in moment.config.independent_groups:
            yield f"key {key}, which is resident, lost group {group}"
        if key in kept and not moment.config.independent_groups:
            yield f"key {key} lost group {group} and kept others"
    if not moment.config.prefix_tree and isinstance(moment.operation, structs.EvictOp | structs.ExportOp):
        free = [key for key, _ in moment.before.cached if key not in moment.ledger.resident]
        if gone != free[: len(gone)]:
            yield f"{gone} were evicted, where the least recently used are {free[: len(gone)]}"
        counts = {key: sum(block != NULL for block in row) for key, row in moment.before.cached}
        if sum(counts[key] for key in gone[:-1]) >= moment.operation.least:
            yield f"{len(gone)} keys were evicted for {moment.operation.least} blocks"
    yield from _enough(moment)


def _enough(moment: RtpMoment) -> Iterator[str]:
    operation = moment.operation
    if not isinstance(operation, structs.EvictOp | structs.ExportOp) or moment.ledger.resident:
        return
    count = len(moment.left)
    if isinstance(moment.answer, structs.Count) and moment.answer.count != count:
        yield f"{moment.answer.count} blocks are said to have been evicted, {count} were"
    if isinstance(moment.answer, structs.Selected):
        told = sum(block != NULL for row in moment.answer.blocks or () for block in row)
        if told != count:
            yield f"{told} blocks were exported, {count} left the cache"
    if count < operation.least and moment.after.cached:
        yield f"{count} blocks were evicted of {operation.least}, and more are there"


@rtp_invariant("rtp chains", "B-I33")
def chains(moment: RtpMoment) -> Iterator[str]:
    """Under a prefix tree nothing is evicted from under a cached key: what it was entered behind is cached as well.

    Holds after every operation. Exceptions: one group alone, whose keys are all roots; groups that may lose blocks
    alone; caches without a full group, whose prefixes have holes; context parallelism.
    """
    config = moment.config
    if not config.prefix_tree or config.cp_size > 1 or config.independent_groups or config.name == SINGLE:
        return
    if not any(moment.is_full(g) and policy.enable_prefix_reuse for g, policy in enumerate(config.policies)):
        return
    cached = {key for key, _ in moment.after.cached}
    for key in cached:
        parent = moment.ledger.parents.get(key)
        if parent is not None and parent not in cached:
            yield f"key {key} is cached, and {parent}, on which it builds, is not"


@rtp_invariant("rtp version", "B-I34")
def version(moment: RtpMoment) -> Iterator[str]:
    """The cache's version grows with every insertion that changes what is cached, and with every block that leaves its
    key alone; with nothing else.

    Holds after every operation. Exception: insertions of resident keys always count as changes.
    """
    before, after = moment.before.version, moment.after.version
    if isinstance(moment.operation, structs.InsertOp):
        if moment.entered and after <= before:
            yield f"{len(moment.entered)} blocks were entered, and the version went from {before} to {after}"
        return
    alone = [key for key, group in moment.left if group in moment.config.independent_groups]
    kept = {key for key, _ in moment.after.cached}
    # A key that has lost everything may have lost its blocks one by one, or have left whole.
    least = sum(key in kept for key in alone)
    if not least <= after - before <= len(alone):
        yield f"the version went from {before} to {after}, and {least} to {len(alone)} blocks left alone"


# Blocks and who holds them: requests, connectors, the cache.

ROLES = ("request", "connector", "cache")


@rtp_invariant("rtp conservation", "B-I1", "B-I4")
def conservation(moment: RtpMoment) -> Iterator[str]:
    """Every block but block 0 is either free or held, block 0 is neither, and free ids come in ascending order.

    Holds after every operation, for each pool. No exception.
    """
    for index, pool in enumerate(moment.after.pools):
        held = {int(block) for role in ROLES for block in getattr(pool, role)}
        every = set(range(1, moment.config.num_blocks[index]))
        if sorted(set(pool.free)) != pool.free:
            yield f"pool {index} lists its free blocks as {pool.free}"
        if held | set(pool.free) != every or held & set(pool.free):
            yield f"of pool {index}, {sorted(every - held - set(pool.free))} are nowhere and "
            yield f"{sorted(held & set(pool.free))} both free and held"


@rtp_invariant("rtp references", "B-I2", "B-I32", "B-I38")
def references(moment: RtpMoment) -> Iterator[str]:
    """Every reference is somebody's: a list's, a connector's, the cache's; and the other way round.

    Holds after every operation, role by role. A request that was freed, dropped or refused has none. Blocks that were
    exported keep the cache's references until they are settled. No exception.
    """
    wanted: dict[str, Counter[tuple[int, int]]] = {role: Counter() for role in ROLES}
    for rows in moment.after.lists.values():
        for row in rows:
            for group, blocks in enumerate(row):
                wanted["request"].update((moment.pool_of(group), block) for block in blocks if block != NULL)
    for role, blocks in moment.ledger.held.values():
        wanted[role].update(blocks)
    for (_, group), block in moment.slots(moment.after).items():
        wanted["cache"][moment.pool_of(group), block] += 1
    for blocks in moment.ledger.exported.values():
        wanted["cache"].update(dict.fromkeys(blocks, 1))
    for role in ROLES:
        pools = enumerate(moment.after.pools)
        found = {(index, int(block)): count for index, pool in pools for block, count in getattr(pool, role).items()}
        if found != dict(wanted[role]):
            yield f"{role} references are {found}, not {dict(wanted[role])}"


@rtp_invariant("rtp order of blocks", "B-I33", after=(structs.MallocOp,))
def smallest_first(moment: RtpMoment) -> Iterator[str]:
    """Fresh blocks are the smallest free ids.

    Holds after a granted `malloc`. Exception: one for which something had to be evicted.
    """
    if not moment.granted or moment.left:
        return
    for index, (before, after) in enumerate(zip(moment.before.pools, moment.after.pools, strict=True)):
        kept = set(after.free)
        taken = [block for block in before.free if block not in kept]
        if taken != before.free[: len(taken)]:
            yield f"pool {index} handed out {taken} of {before.free}"


@rtp_invariant("rtp holding", "B-I28", after=(structs.HoldOp,))
def holding(moment: RtpMoment) -> Iterator[str]:
    """The blocks held of a sequence are its own, each under its own key.

    Holds after `hold`. Exception: under context parallelism keys and blocks do not stand side by side.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, structs.HoldOp)
    assert isinstance(answer, structs.Selected)
    if answer.keys is None or answer.blocks is None or moment.config.cp_size > 1:
        return
    keys = moment.ledger.keys(operation.id, operation.sequence, partial=True)
    row = moment.before.lists[operation.id][operation.sequence]
    for place, key in enumerate(answer.keys):
        position = keys.index(key) if key in keys else len(keys)
        own = [blocks[position] if position < len(blocks) else NULL for blocks in row]
        held = [blocks[place] for blocks in answer.blocks]
        if held != own:
            yield f"under key {key} are held {held}, where the sequence has {own}"
