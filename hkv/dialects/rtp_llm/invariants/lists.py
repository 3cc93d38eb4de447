"""Rules of requests' lists: as long as they must be, of blocks that hold the sequence's own content."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NULL, SINGLE
from hkv.dialects.rtp_llm.invariants.moment import RtpMoment, Slots, rtp_invariant
from hkv.model.group_policy import CpMapping, GroupType

# Rules of reuse: a new request takes over the longest prefix that all groups can go on from, exactly its blocks.


@rtp_invariant("rtp hit", "B-I8", "B-I9", "B-I10", after=(structs.MallocOp,))
def hit(moment: RtpMoment) -> Iterator[str]:
    """A new request takes over the longest prefix that every group can go on from, and a token is left to compute.

    Holds after a first `malloc` that is granted; every length is tried. A full group needs every block, a linear one
    the state at the end, a window with reuse its last block, a window without reuse nothing. The last key never
    counts, though its block be whole. Exception: ranks without a full group count one block of tokens for a key that
    stands for a round of them.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, structs.MallocOp)
    assert isinstance(answer, structs.Malloc)
    if not moment.granted or operation.id in moment.before.lists:
        if answer.reused:
            yield f"{answer.reused} tokens are taken over by a request that is no new one, or was refused"
        return
    wanted = longest(moment, operation) * moment.tokens_of_a_key
    if answer.reused != wanted:
        yield f"{answer.reused} tokens are taken over, {wanted} can be"
    if answer.reused >= len(moment.ledger.requests[operation.id].tokens[0]):
        yield f"{answer.reused} tokens are taken over of as many: none is left to compute"


def longest(moment: RtpMoment, operation: structs.MallocOp) -> int:
    """Keys of the longest prefix from which every group can go on, as the cache stood before."""
    if not operation.device_cache or moment.config.prefill_cp_size > 1:
        return 0
    cached = moment.slots(moment.before)
    keys = moment.ledger.keys(operation.id, 0, partial=True)[:-1]
    groups = range(len(moment.config.policies))
    lengths = [n for n in range(1, len(keys) + 1) if all(_resumes(moment, cached, group, keys[:n]) for group in groups)]
    return max(lengths, default=0)


def _resumes(moment: RtpMoment, cached: Slots, group: int, keys: list[int]) -> bool:
    policy = moment.config.policies[group]
    if policy.group_type is GroupType.FULL:
        return all((key, group) in cached for key in keys)
    if policy.group_type is GroupType.SWA and not policy.enable_prefix_reuse:
        return True
    return (keys[-1], group) in cached


@rtp_invariant("rtp adoption", "B-I7", "B-I10", after=(structs.MallocOp,))
def adoption(moment: RtpMoment) -> Iterator[str]:
    """A request takes over the cached blocks, each at its own place; what it computes itself is in other blocks.

    Holds after a first `malloc` that is granted, for every sequence. Exception: windows and states under context
    parallelism, whose places depend on the rank.
    """
    operation, answer, config = moment.operation, moment.answer, moment.config
    assert isinstance(operation, structs.MallocOp)
    assert isinstance(answer, structs.Malloc)
    if not moment.granted or operation.id in moment.before.lists:
        return
    cached, taken = moment.slots(moment.before), answer.reused // moment.tokens_of_a_key
    keys = moment.ledger.keys(operation.id, 0, partial=True)[:taken]
    for sequence, row in enumerate(answer.lists):
        for group, blocks in enumerate(row):
            policy = config.policies[group]
            if policy.group_type is GroupType.FULL:
                wanted = [cached.get((key, group), NULL) for key in keys]
            elif config.cp_size > 1 and policy.cp_mapping is not CpMapping.BLOCK_ROUND_ROBIN:
                continue
            else:
                silent = policy.group_type is GroupType.SWA and not policy.enable_prefix_reuse
                last = NULL if silent else cached.get((keys[-1], group), NULL) if keys else NULL
                wanted = [*[NULL] * (taken - 1), last][:taken]
            begins = blocks[: len(wanted)]
            exact = policy.group_type is GroupType.FULL
            if any(mine != theirs for mine, theirs in zip(begins, wanted, strict=False) if exact or theirs != NULL):
                yield f"group {group} of sequence {sequence} begins with {begins}, cached is {wanted}"
            known = {block for (_, g), block in cached.items() if moment.pool_of(g) == moment.pool_of(group)}
            evicted = {block for (_, g), block in moment.left.items() if moment.pool_of(g) == moment.pool_of(group)}
            fresh = {block for block in blocks if block != NULL} - {block for block in wanted if block != NULL}
            if strange := fresh & (known - evicted):
                yield f"group {group} of sequence {sequence} computes into {sorted(strange)}, which are cached"


# Rules of lists: as long as they must be, of blocks that hold the sequence's own content. Asked after those of reuse: a
# wrong hit makes wrong lists.


@rtp_invariant("rtp lists", "B-I4", "B-I14")
def lists(moment: RtpMoment) -> Iterator[str]:
    """A full group's list has no hole, and no list names a block twice, nor block 0.

    Holds after every operation. Exceptions are kinds, not moments: LINEAR and SWA lists have holes.
    """
    for id, rows in moment.after.lists.items():
        for row in rows:
            for group, blocks in enumerate(row):
                real = [block for block in blocks if block != NULL]
                if len(set(real)) < len(real) or 0 in real:
                    yield f"group {group} of {id} has {blocks}"
                if moment.is_full(group) and NULL in blocks:
                    yield f"full group {group} of {id} has a hole in {blocks}"


@rtp_invariant("rtp room", "B-I12", "B-I16", after=(structs.MallocOp,))
def room(moment: RtpMoment) -> Iterator[str]:
    """A list has a slot for every block of the tokens, and the reserve: in tokens, or LINEAR states less one.

    Holds after a granted `malloc`, for every sequence; lists never become shorter. Exceptions: under context
    parallelism a rank has slots for its own share; with `length` they are for other than all tokens. With blocks of 4,
    10 tokens and a reserve of 3 are 4 slots of a full group and 3 + 2 of a linear one.
    """
    operation = moment.operation
    assert isinstance(operation, structs.MallocOp)
    if not moment.granted or moment.config.cp_size > 1 or operation.length is not None:
        return
    record, groups = moment.ledger.requests[operation.id], moment.config.topology.groups
    tokens = len(record.tokens[0])
    old = moment.before.lists.get(operation.id, [])
    for sequence, row in enumerate(moment.after.lists[operation.id]):
        for group, blocks in enumerate(row):
            size = groups[group].spec.block_size
            if moment.config.policies[group].group_type is GroupType.LINEAR:
                wanted = -(-tokens // size) + max(record.reserve - 1, 0)
            else:
                wanted = -(-(tokens + record.reserve) // size)
            before = len(old[sequence][group]) if old else 0
            if len(blocks) != max(wanted, before):
                yield f"group {group} of sequence {sequence} has {len(blocks)} slots for {tokens} tokens, not {wanted}"


@rtp_invariant("rtp retention", "B-I13", "B-I14", after=(structs.MallocOp,))
def retention(moment: RtpMoment) -> Iterator[str]:
    """The last states and blocks are there, those on the grid stay for reuse, what lies further back is given back.

    Holds after a granted `malloc`. A first allocation gives nothing back, whatever a hit brought. Exceptions: one
    group alone gives nothing back; under context parallelism positions are a rank's own; with `length` the end is not
    that of all tokens, nor is it of a list that an earlier one made longer; SWA lists are not filled afterwards.
    """
    operation, config = moment.operation, moment.config
    assert isinstance(operation, structs.MallocOp)
    if not moment.granted or config.cp_size > 1 or config.name == SINGLE or operation.length is not None:
        return
    record, old = moment.ledger.requests[operation.id], moment.before.lists.get(operation.id)
    slots = -(-len(record.tokens[0]) // config.block_size)
    for sequence, row in enumerate(moment.after.lists[operation.id]):
        for group, blocks in enumerate(row):
            policy, linear = config.policies[group], config.policies[group].group_type is GroupType.LINEAR
            if moment.is_full(group):
                continue
            step = max(1, config.linear_step) if operation.reuse and (linear or policy.enable_prefix_reuse) else 0
            tail = max(1, policy.active_tail_blocks)
            kept = max(2, tail) if linear else tail
            end = len(blocks) - kept - record.reserve
            before = old[sequence][group] if old else []
            for position, block in enumerate(blocks):
                grid = step and (position + 1) % step == 0
                missing = linear and slots - tail <= position < slots == len(blocks) - max(record.reserve - 1, 0)
                if block == NULL and (missing or (linear and grid and position < slots)):
                    yield f"group {group} has no state at {position} of {blocks}"
                if block != NULL and old and position < end and not grid:
                    yield f"group {group} still has block {block} at {position} of {blocks}"
                gone = position < len(before) and before[position] not in (NULL, block)
                if gone and (block != NULL or grid or position >= end):
                    yield f"group {group} lost block {before[position]} at {position} of {before}"


@rtp_invariant("rtp ownership", "B-I3", "B-I5", "B-I7", "B-I31")
def ownership(moment: RtpMoment) -> Iterator[str]:
    """A block that is cached or shared holds one whole prefix: the same, at the same place, for all that name it.

    Holds after every operation. A cached block in a list is full, and its key is that of the list's own tokens.
    Exceptions: context parallelism, and requests that were forked without copies, with slots ahead, after an insertion,
    or of several sequences freed and begun anew: a fork copies the last slot alone, and with slots ahead the block that
    is written next lies before it; copies go into last blocks of sequences that are given up, cached or not (RTP-LLM
    enters what has ended, which nobody forks); a first allocation takes all sequences for equal, up to what was the
    common length when they came. What such a request entered is not judged either.
    """
    if moment.config.cp_size > 1:
        return
    cached = {(moment.pool_of(g), block): (key, g) for (key, g), block in moment.slots(moment.after).items()}
    unsure = {place for place, (key, _) in cached.items() if key in moment.ledger.unsure}
    names: dict[tuple[int, int], set[tuple[int, int, int | None]]] = defaultdict(set)
    times: Counter[tuple[int, int]] = Counter()
    for id, rows in moment.after.lists.items():
        if moment.ledger.requests[id].shared:
            continue
        for sequence, row in enumerate(rows):
            keys = moment.ledger.keys(id, sequence)
            for group, blocks in enumerate(row):
                for position, block in enumerate(blocks):
                    place = (moment.pool_of(group), block)
                    if block == NULL or place in unsure:
                        continue
                    key = keys[position] if position < len(keys) else None
                    names[place].add((group, position, key))
                    times[place] += 1
                    if place in cached and cached[place] != (key, group):
                        yield f"block {block} at {position} of group {group} of {id} is cached as {cached[place]}"
    for place, found in names.items():
        if times[place] > 1 and (len(found) > 1 or any(key is None for _, _, key in found)):
            yield f"block {place[1]} of pool {place[0]} is shared by {sorted(found, key=str)}"


@rtp_invariant("rtp refusal", "B-I24", after=(structs.MallocOp,))
def refusal(moment: RtpMoment) -> Iterator[str]:
    """A refused request keeps exactly what it had, and no request is refused that certainly fits.

    Holds after `malloc`. What was evicted on the way stays evicted; a `permanent` refusal evicts nothing. Exceptions: a
    refusal is judged by more blocks than any rule could ask for, one for every slot of every sequence; a request that
    takes over cached blocks but is not to be reused is refused by a need that leaves them out. A group in need evicts
    only keys of which it has a block, so that cached blocks count as free only under keys that all groups have, and
    only where nothing is resident and no group may lose blocks alone, which does so in place of keys that leave whole.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, structs.MallocOp)
    assert isinstance(answer, structs.Malloc)
    if moment.granted:
        return
    before, after = moment.before, moment.after
    if before.lists != after.lists:
        yield f"the refusal changed {before.lists} to {after.lists}"
    if [pool.request for pool in before.pools] != [pool.request for pool in after.pools]:
        yield "the refusal changed who holds blocks"
    if answer.verdict == "permanent" and moment.left:
        yield f"{moment.left} were evicted for a request that never fits"
    if operation.device_cache and not operation.reuse:
        return
    totals, room = _most_needed(moment, operation), [count - 1 for count in moment.config.num_blocks]
    cached = _evictable(moment)
    for index, needed in enumerate(totals):
        if needed + moment.config.reserve_blocks > room[index]:
            return
    if answer.verdict == "permanent":
        yield f"refused for ever, though {totals} blocks fit into {room}"
    free = [len(pool.free) + count for pool, count in zip(before.pools, cached, strict=True)]
    if all(needed + moment.config.reserve_blocks <= count for needed, count in zip(totals, free, strict=True)):
        yield f"refused, though at most {totals} blocks are needed and {free} are free or evictable"


def _most_needed(moment: RtpMoment, operation: structs.MallocOp) -> list[int]:
    record = moment.ledger.requests[operation.id]
    tokens = max(len(record.tokens[0]), operation.length or 0)
    slots = -(-(tokens + record.reserve) // moment.config.block_size) + record.reserve
    totals = [0] * moment.config.topology.num_pools
    for group in range(len(moment.config.policies)):
        totals[moment.pool_of(group)] += slots * len(record.tokens)
    return totals


def _evictable(moment: RtpMoment) -> list[int]:
    """Number of blocks of each pool that only the cache holds, once, and that eviction gives for sure.

    A block that was exported and entered again has a second reference until its copy is made.
    """
    counts = [0] * moment.config.topology.num_pools
    if moment.ledger.resident or moment.config.independent_groups:
        return counts
    for _, row in moment.before.cached:
        for group, block in enumerate(row if NULL not in row else ()):
            pool, name = moment.before.pools[moment.pool_of(group)], str(block)
            held = name in pool.request or name in pool.connector or pool.cache.get(name) != 1
            counts[moment.pool_of(group)] += not held
    return counts


@rtp_invariant("rtp forks", "B-I2", "B-I31", after=(structs.ForkOp,))
def forks(moment: RtpMoment) -> Iterator[str]:
    """The last of equal sequences keeps the blocks; earlier ones share them and get a last block of their own.

    Holds after `fork`; a refused one changes nothing. Exception: of one group alone, a refused fork has already given
    back the sequences that are not continued.
    """
    operation, answer = moment.operation, moment.answer
    assert isinstance(operation, structs.ForkOp)
    assert isinstance(answer, structs.Fork)
    old = moment.before.lists.get(operation.id, [])
    new = moment.after.lists.get(operation.id, [])
    if answer.copies is None:
        if moment.config.name != SINGLE and old != new:
            yield f"the refused fork changed {old} to {new}"
        return
    if not operation.sources or not old:
        return
    if len(new) != len(operation.sources):
        yield f"{len(new)} sequences come from {operation.sources}"
        return
    tags = [group.tag for group in moment.config.topology.groups]
    targets = Counter((tag, target) for tag, _, target in answer.copies)
    if targets and max(targets.values()) > 1:
        yield f"a block is copied into twice: {answer.copies}"
    for place, source in enumerate(operation.sources):
        again = source in operation.sources[place + 1 :]
        for group, (mine, theirs) in enumerate(zip(new[place], old[source], strict=True)):
            if not again or not operation.copy_last or not theirs:
                if mine != theirs:
                    yield f"sequence {place} of group {group} is {mine}, not {theirs} of its source"
            elif mine[:-1] != theirs[:-1] or mine[-1] in theirs:
                yield f"sequence {place} of group {group} is {mine}, beside {theirs} of its source"
            elif theirs[-1] != NULL and (tags[group], theirs[-1], mine[-1]) not in map(tuple, answer.copies):
                yield f"block {theirs[-1]} of group {group} is not copied to {mine[-1]}"
