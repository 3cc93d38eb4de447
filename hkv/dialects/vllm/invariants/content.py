"""Keys say what blocks hold: one key for one content, kept as long as the content is, gone with it."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.moment import Moment, invariant
from hkv.dialects.vllm.log import structs as oplog


@invariant("identity", "B-I6")
def identity(moment: Moment) -> Iterator[str]:
    """Equal keys mean equal prefixes, and equal prefixes have equal keys.

    A prefix is its tokens from 0 on, and everything else that shapes the cache: adapter, salt, multimodal items where
    they lie, prompt embeddings, look-ahead tokens. Holds after every operation. Exception: only the first 8 bytes of
    keys are seen, so that a collision of those alone would be reported too.
    """
    for key, prefixes in moment.book.prefixes.items():
        if len(prefixes) > 1:
            yield f"key {key} stands for {len(prefixes)} different prefixes"
    for prefix, keys in moment.book.keys.items():
        if len(keys) > 1:
            yield f"one prefix of {moment.ledger.length(prefix)} tokens has keys {sorted(keys)}"


@invariant("index", "B-I5", "B-I30", "B-I31")
def index(moment: Moment) -> Iterator[str]:
    """The key of a block in a row names what the row's owner has there: its group, its column, its tokens.

    Holds after every operation; so a block that is handed out anew has lost the key of its old content. Exception: a
    Mamba checkpoint inside a chunk stands in a column of its own: 15 tokens in blocks of 4 leave the state after 12 in
    column 2 as usual, but one after 14 would stand there too.
    """
    config, ledger, sizes = moment.config, moment.ledger, moment.config.block_sizes
    for block, (group, tokens, key) in moment.after.cached.items():
        names = moment.book.prefixes.get(key, set())
        if not any(ledger.length(name) == tokens for name in names):
            known = sorted({ledger.length(name) for name in names})
            said = f"stands for {', '.join(map(str, known))}" if known else "is of no prefix that a request ever had"
            yield f"block {block} is cached as {tokens} tokens of group {group} under key {key}, which {said}"
        for id, owner_group, column in moment.after.owners.get(block, ()):
            start = column * sizes[owner_group]
            inside = start < tokens <= start + sizes[owner_group]
            if owner_group != group or not (inside or _holds_checkpoints(config, group)):
                yield f"block {block} at column {column} of group {owner_group} is cached as {tokens} tokens of {group}"
            elif ledger.prefix(id, tokens) not in names:
                yield f"block {block} holds the first {tokens} tokens of {id}, but its key is of another prefix"


def _holds_checkpoints(config: VllmConfig, group: int) -> bool:
    """True if chunks export states on their way, each in a column that says nothing of its length."""
    spec = config.topology.groups[group].spec
    return kinds.layer(spec).checkpoint_blocks > 0


@invariant("key life", "B-I5")
def key_life(moment: Moment) -> Iterator[str]:
    """Keys come when blocks are filled and go when blocks are handed out, evicted, filled further or reset; only then.

    Holds after every operation: `allocate` and `commit` may add keys to blocks in rows, and take them only from blocks
    of the request's own row or of the queue's front; `evict` takes exactly the keys of the blocks it names; a
    successful `reset` all of them; everything else none. Exception: a Mamba owner that writes on leaves its key to a
    copy: the block in its row loses it, a block taken from the queue has it. (Under a prefill lookahead the block may
    get the same key again at once, as its tokens are settled one step later.)
    """
    before, after, operation = moment.before, moment.after, moment.operation
    lost = {block for block, entry in before.cached.items() if after.cached.get(block) != entry}
    gained = {block for block, entry in after.cached.items() if before.cached.get(block) != entry}
    if isinstance(operation, oplog.EvictOp):
        if gained or lost != set(operation.blocks) & before.cached.keys():
            yield f"blocks {sorted(lost)} lost keys and {sorted(gained)} gained some, not {operation.blocks}"
    elif isinstance(operation, oplog.ResetOp):
        done = isinstance(moment.answer, oplog.Reset) and moment.answer.ok
        if done and before.cached.keys() - lost:
            yield f"reset answered True, and blocks {sorted(before.cached.keys() - lost)} keep their keys"
        elif gained or (lost and not done):
            yield f"reset answered {done}: {_keys_changed(lost, gained)}"
    elif isinstance(operation, oplog.AllocateOp | oplog.CommitOp):
        taken = set(before.free) - set(after.free)
        own = {block for block, owners in before.owners.items() if any(id == operation.id for id, _, _ in owners)}
        moved = {before.cached[block] for block in own & before.cached.keys()}
        for block in sorted(gained - after.owners.keys()):
            if after.cached[block] not in moved:
                yield f"block {block} gained a key, in nobody's row, that no block of the request's had"
        strange = lost - taken - own
        if strange:
            yield f"blocks {sorted(strange)} lost their keys, though neither handed out nor the request's own"
        early = {block for block in gained if after.cached[block] not in moved}
        if isinstance(operation, oplog.AllocateOp) and operation.delay and early:
            yield f"blocks {sorted(early)} gained keys, though registration was to wait"
    elif lost or gained:
        yield f"{_keys_changed(lost, gained)}, though nothing was handed out, computed or evicted"


def _keys_changed(lost: set[int], gained: set[int]) -> str:
    changes = (("lose their keys", lost), ("gain keys", gained))
    return " and ".join(f"blocks {sorted(blocks)} {verb}" for verb, blocks in changes if blocks)


@invariant("registration", "B-I13", "B-I31", after=(oplog.AllocateOp, oplog.CommitOp))
def registration(moment: Moment) -> Iterator[str]:
    """Keys come to blocks that a hit may end in, and that nobody fills again; full attention's all get theirs at once.

    Holds after `allocate` and `commit`. Tokens that drafts may prefill again are left out where a draft's group, or one
    group alone, is concerned; of several groups, blocks beyond the last whole scheduler block too, but for one more of
    a draft's. Without caching there are no keys. Exceptions: the lower bound is not asked of `commit`, of tokens that
    come from elsewhere, of sparse retention, under bounded replay and with hits inside blocks. With blocks of 4 and 6,
    of 20 tokens the first 12 get keys.
    """
    operation, config = moment.operation, moment.config
    assert isinstance(operation, oplog.AllocateOp | oplog.CommitOp)
    if not config.caching and moment.after.cached:
        yield f"blocks {sorted(moment.after.cached)} have keys, though nothing is to be cached"
    length = len(moment.ledger.requests[operation.id].tokens)
    allocating = isinstance(operation, oplog.AllocateOp)
    tokens = min(moment.ledger.main(operation), length) if allocating else operation.tokens
    moved = moment.before.entries
    for block, (group, covered, key) in moment.after.cached.items():
        fresh = moment.before.cached.get(block) != (group, covered, key) and (group, key) not in moved
        if fresh and covered > _registrable(config, group, tokens):
            reach = _registrable(config, group, tokens)
            whose = f"the first {covered} tokens of {operation.id}"
            yield f"block {block} of group {group} is cached as {whose}, beyond the {reach} that a hit may end in"
    granted = isinstance(moment.answer, oplog.Allocation) and moment.answer.blocks is not None
    dense = config.caching and config.retention_interval is None and not config.partial_hits
    dense = dense and not any(kinds.layer(spec).replays for spec in config.topology.specs)
    if not (allocating and granted and dense) or operation.delay:
        return
    rows = moment.after.rows.get(operation.id, [])
    for group in range(len(config.topology.groups)):
        row = rows[group] if group < len(rows) else []
        size, end = config.block_size(group), _registrable(config, group, tokens)
        if config.topology.groups[group].spec.reads_all:
            end = min(end, max(0, length - config.hash_lookahead) // config.hash_block_size * config.hash_block_size)
            for column in range(-(-(moment.ledger.total(operation) + 1) // size) - 1, end // size):
                block = row[column] if column < len(row) else 0
                if block not in moment.after.cached:
                    yield f"block {block} at column {column} of group {group} is full, and has no key"


def _registrable(config: VllmConfig, group: int, tokens: int) -> int:
    """Number of the first `tokens` tokens that may get keys in a group."""
    settled = max(0, tokens - max(0, config.prefill_lookahead - 1))
    if len(config.topology.groups) == 1:
        return settled
    drafts = {config.topology.groups[index].spec for index in config.eagle_group_ids}
    unit = 1 if config.partial_hits else config.scheduler_block_size
    if config.topology.groups[group].spec in drafts and tokens >= unit:
        return min(settled, settled // unit * unit + config.block_size(group))
    return tokens // unit * unit
