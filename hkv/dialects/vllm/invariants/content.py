"""Keys say what blocks hold: one key for one content, kept as long as the content is, gone with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hkv.dialects.vllm.invariants.arrays import ArrayMoment, Wrong, array_invariant
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


@array_invariant("index", "B-I5", "B-I30", "B-I31")
def index(m: ArrayMoment) -> Iterator[Wrong]:
    """The key of a block in a row names what the row's owner has there: its group, its column, its tokens.

    Holds after every operation; so a block that is handed out anew has lost the key of its old content. Exception: a
    Mamba checkpoint inside a chunk stands in a column of its own: 15 tokens in blocks of 4 leave the state after 12 in
    column 2 as usual, but one after 14 would stand there too.
    """
    after, groups, at = m.after, m.groups, m.columns(m.after)
    yield ~m.named & after.cached, lambda block: m.unnamed(block)
    rows, sizes = after.rows, groups.sizes[:, None]
    tokens, holder = m.take(after.tokens, rows), m.take(after.group, rows)
    known = (rows > 0) & (tokens > 0)
    inside = ((at * sizes < tokens) & (tokens <= (at + 1) * sizes)) | (groups.checkpoint_blocks > 0)[:, None]
    apart = known & ((holder != np.arange(len(sizes))[:, None]) | ~inside)
    yield (
        apart,
        lambda row, group, at: (
            f"block {rows[row, group, at]} at column {at} of group {group} is cached as {tokens[row, group, at]} tokens"
            f" of {holder[row, group, at]}"
        ),
    )
    yield (
        known & ~m.owned(known),
        lambda row, group, at: (
            f"block {rows[row, group, at]} holds the first {tokens[row, group, at]} tokens of {m.names[row]}, but its"
            " key is of another prefix"
        ),
    )


FILLING = (oplog.AllocateOp, oplog.CommitOp)
"""Operations by which blocks are filled."""


@array_invariant("key life", "B-I5")
def key_life(m: ArrayMoment) -> Iterator[Wrong]:
    """Keys come when blocks are filled and go when blocks are handed out, evicted, filled further or reset; only then.

    Holds after every operation: `allocate` and `commit` may add keys to blocks in rows, and take them only from blocks
    of the request's own row or of the queue's front; `evict` takes exactly the keys of the blocks it names; a
    successful `reset` all of them; everything else none. Exception: a Mamba owner that writes on leaves its key to a
    copy: the block in its row loses it, a block taken from the queue has it. (Under a prefill lookahead the block may
    get the same key again at once, as its tokens are settled one step later.)
    """
    before, after = m.before, m.after
    changed = before.entry != after.entry
    lost, gained = changed & before.cached, changed & after.cached

    def list_of(blocks: Any) -> list[int]:
        return blocks.nonzero()[0].tolist()

    def told(_: int) -> str:
        changes = (("lose their keys", lost), ("gain keys", gained))
        return " and ".join(f"blocks {list_of(blocks)} {verb}" for verb, blocks in changes if blocks.any())

    if m.may(oplog.EvictOp):
        wanted = m.does(oplog.EvictOp)
        yield (
            wanted & (gained | (lost != (m.evicted & before.cached))),
            lambda _: f"blocks {list_of(lost)} lost keys and {list_of(gained)} gained some, not {m.operation.blocks}",
        )
    if m.may(oplog.ResetOp):
        reset = m.does(oplog.ResetOp)
        kept = before.cached & ~lost
        yield reset & m.granted & kept, lambda _: f"reset answered True, and blocks {list_of(kept)} keep their keys"
        yield reset & (gained | (lost & ~m.granted)), lambda _: f"reset answered {m.granted}: {told(_)}"
    if m.may(*FILLING):
        filling = m.does(*FILLING)
        taken = (before.queued > 0) & (after.queued == 0)
        own = m.places(m.mine(before.rows)) > 0
        # A Mamba owner that writes on leaves its key to a copy: an entry that moved is not a new one.
        fresh = gained & ~m.among(after.entry, before.entry, own & before.cached)
        nobodys = fresh & (m.places(after.rows) == 0)
        yield (
            filling & nobodys,
            lambda block: f"block {block} gained a key, in nobody's row, that no block of the request's had",
        )
        strange = lost & ~taken & ~own
        yield (
            filling & strange,
            lambda _: f"blocks {list_of(strange)} lost their keys, though neither handed out nor the request's own",
        )
        yield (
            m.does(oplog.AllocateOp) & (m.delay != 0) & fresh,
            lambda _: f"blocks {list_of(fresh)} gained keys, though registration was to wait",
        )
    others = ~m.does(oplog.EvictOp, oplog.ResetOp, *FILLING)
    yield others & changed, lambda _: f"{told(_)}, though nothing was handed out, computed or evicted"


@array_invariant("registration", "B-I13", "B-I31", after=(oplog.AllocateOp, oplog.CommitOp))
def registration(m: ArrayMoment) -> Iterator[Wrong]:
    """Keys come to blocks that a hit may end in, and that nobody fills again; full attention's all get theirs at once.

    Holds after `allocate` and `commit`. Tokens that drafts may prefill again are left out where a draft's group, or one
    group alone, is concerned; of several groups, blocks beyond the last whole scheduler block too, but for one more of
    a draft's. Without caching there are no keys. Exceptions: the lower bound is not asked of `commit`, of tokens that
    come from elsewhere, of sparse retention, under bounded replay and with hits inside blocks. With blocks of 4 and 6,
    of 20 tokens the first 12 get keys.
    """
    before, after, config, groups = m.before, m.after, m.config, m.groups
    if not config.caching:
        said = "have keys, though nothing is to be cached"
        yield after.cached, lambda _: f"blocks {after.cached.nonzero()[0].tolist()} {said}"
    length, allocating = m.fact("length"), m.does(oplog.AllocateOp)
    limit = m.registrable(m.xp.where(allocating, m.xp.minimum(m.total + m.new, length), m.settled))
    fresh = after.cached & (before.entry != after.entry) & ~m.among(after.entry, before.entry, before.cached)
    reach = m.xp.sum(m.xp.where(after.group[:, None] == np.arange(len(limit)), limit, 0), axis=1)

    def beyond(block: int) -> str:
        whose = f"the first {after.tokens[block]} tokens of {m.id}"
        group = f"block {block} of group {after.group[block]}"
        return f"{group} is cached as {whose}, beyond the {reach[block]} that a hit may end in"

    yield fresh & (after.tokens > reach), beyond
    dense = config.caching and config.retention_interval is None and not config.partial_hits
    if not dense or any(spec.replays for spec in config.topology.specs):
        return
    unit = config.hash_block_size
    whole = m.xp.maximum(length - config.hash_lookahead, 0) // unit * unit
    at, rows = m.columns(after), m.mine(after.rows)
    first = m.blocks_for(m.total + 1) - 1
    due = (at >= first[:, None]) & (at < (m.xp.minimum(limit, whole) // groups.sizes)[:, None])
    unknown = due & groups.reads_all[:, None] & ~m.take(after.cached, rows)
    yield (
        allocating & m.granted & (m.delay == 0) & unknown,
        lambda group, at: f"block {rows[group, at]} at column {at} of group {group} is full, and has no key",
    )
