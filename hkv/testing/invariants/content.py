"""Keys say what blocks hold: one key for one content, kept as long as the content is, gone with it."""

from __future__ import annotations

from collections.abc import Iterator

from hkv.oracle import oplog
from hkv.testing.invariants.invariant import invariant
from hkv.testing.invariants.moment import Moment


@invariant("identity", "B-I6")
def identity(moment: Moment) -> Iterator[str]:
    """Equal keys mean equal prefixes, and equal prefixes have equal keys.

    A prefix is its tokens from 0 on, and what beside them shapes the cache: adapter, salt, multimodal items where they
    lie, prompt embeddings, look-ahead tokens. Holds after every operation. Exception: only the first 8 bytes of keys
    are seen, so that a collision of those alone would be reported too.
    """
    for key, prefixes in moment.book.prefixes.items():
        if len(prefixes) > 1:
            yield f"key {key} stands for {len(prefixes)} different prefixes"
    for prefix, keys in moment.book.keys.items():
        if len(keys) > 1:
            yield f"one prefix of {moment.ledger.length(prefix)} tokens has keys {sorted(keys)}"


@invariant("index", "B-I5", "B-I30", "B-I31")
def index(moment: Moment) -> Iterator[str]:
    """What a key says of a block in a row is what the row's owner has there: its group, its column, its tokens.

    Holds after every operation; so a block that is handed out anew has lost the key of its old content. Exception: a
    Mamba checkpoint inside a chunk stands in a column of its own: 15 tokens in blocks of 4 leave the state after 12 in
    column 2 as usual, but one after 14 would stand there too.
    """
    config, ledger = moment.config, moment.ledger
    for block, (group, tokens, key) in moment.after.cached.items():
        names = moment.book.prefixes.get(key, set())
        if not any(ledger.length(name) == tokens for name in names):
            yield f"block {block} is known by {key} for {tokens} tokens, a prefix no request ever had"
        for id, owner_group, column in moment.after.owners.get(block, ()):
            start = column * config.block_size(owner_group)
            inside = start < tokens <= start + config.block_size(owner_group)
            if owner_group != group or not (inside or config.topology.groups[group].spec.snapshot):
                yield f"block {block} at column {column} of group {owner_group} is cached as {tokens} tokens of {group}"
            elif ledger.prefix(id, tokens) not in names:
                yield f"block {block} holds the first {tokens} tokens of {id}, but its key is of another prefix"


@invariant("key life", "B-I5")
def key_life(moment: Moment) -> Iterator[str]:
    """Keys come when blocks are filled and go when blocks are handed out, evicted, filled further or reset; only then.

    Holds after every operation: `allocate` and `commit` may add keys, and take them only from blocks of the request's
    own row or of the queue's front; `evict` takes exactly the keys of the blocks it names; a successful `reset` all of
    them; everything else none. Exception: a Mamba owner that writes on leaves its key to a copy: the block in its row
    loses it, a block taken from the queue has it.
    """
    before, after, operation = moment.before, moment.after, moment.operation
    lost = {block for block, entry in before.cached.items() if after.cached.get(block) != entry}
    gained = {block for block, entry in after.cached.items() if before.cached.get(block) != entry}
    if isinstance(operation, oplog.EvictOp):
        if gained or lost != set(operation.blocks) & before.cached.keys():
            yield f"blocks {sorted(lost)} lost keys and {sorted(gained)} gained some, not {operation.blocks}"
    elif isinstance(operation, oplog.ResetOp):
        done = isinstance(moment.answer, oplog.Reset) and moment.answer.ok
        if gained or lost != (set(before.cached) if done else set()):
            yield f"blocks {sorted(lost)} lost and {sorted(gained)} gained keys"
    elif isinstance(operation, oplog.AllocateOp | oplog.CommitOp):
        taken = set(before.free) - set(after.free)
        own = {block for block, owners in before.owners.items() if any(id == operation.id for id, _, _ in owners)}
        strange = lost - taken - own
        if strange:
            yield f"blocks {sorted(strange)} lost their keys, though neither handed out nor the request's own"
        if isinstance(operation, oplog.AllocateOp) and operation.delay and gained - taken - own:
            yield f"blocks {sorted(gained)} gained keys, though registration was to wait"
    elif lost or gained:
        yield f"blocks {sorted(lost)} lost and {sorted(gained)} gained keys"
