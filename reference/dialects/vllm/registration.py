"""Entering filled blocks, and partly filled ones, into the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from reference.dialects.vllm.request import Request
from reference.keys.views import Chain
from reference.state.events import BlockStored
from reference.state.history import NOT_RETAINED, RETIRED
from reference.state.key_table import Key
from reference.state.pool import NULL, Pool


def register_full(
    pool: Pool,
    request: Request,
    group: int,
    blocks: Sequence[int],
    span: range,
    keys: Sequence[Chain],
    block_size: int,
    mask: Sequence[bool] | None,
) -> None:
    """Register the full blocks `span` of a row, null and masked ones left out (vLLM `cache_full_blocks`).

    A block known so far by a key that covers less loses it first: the block has been filled up. Exactly one
    `BlockStored` event follows, even when nothing was registered.

    Args:
      pool: the pool.
      request: the request.
      group: index of the group.
      blocks: the row.
      span: columns to register, in order.
      keys: the request's keys of whole blocks.
      block_size: tokens per block.
      mask: for each column of `span` whether to register it, or None for all.
    """
    stored: list[Chain] = []
    ends: list[int] = []
    for column in span:
        block, chain = blocks[column], keys[column]
        if block == NULL:
            pool.history.note(group, chain, RETIRED)
        elif mask is not None and not mask[column - span.start]:
            pool.history.note(group, chain, NOT_RETAINED)
        else:
            end = (column + 1) * block_size
            if pool.primary[block] is not None:
                assert pool.covered[block] < end, "a block cannot be filled twice"
                pool.drop_keys(block)
            pool.insert((group, chain), block, end)
            stored.append(chain)
            ends.append(end)
    if pool.records:
        tokens = request.tokens[span.start * block_size : span.stop * block_size]
        parent = keys[span.start - 1] if span.start else None
        pool.events.append(stored_event(request, group, stored, ends, block_size, tokens, parent))


def register_partial(
    pool: Pool,
    request: Request,
    group: int,
    block: int,
    tokens: int,
    hash_block_size: int,
    replace: bool = False,
) -> Key | None:
    """Register a block under the key of its first tokens, a whole number of hash blocks (vLLM `cache_partial_block`).

    Keys that cover less are dropped first. When the block is already known by one that covers more, the new key is
    an extra one. One `BlockStored` event for the last hash block, unless the block had the key already.

    Args:
      pool: the pool.
      request: the request.
      group: index of the group.
      block: the block; nothing happens for the null block.
      tokens: tokens from the start of the request that the block's content covers; a multiple of `hash_block_size`
        within the tokens that have keys.
      hash_block_size: tokens per hash block.
      replace: drop all keys of the block first, whatever they cover.

    Returns:
      The key, or None for the null block.
    """
    if block == NULL:
        return None
    last = tokens // hash_block_size - 1
    chain = request.keys[last]
    key = (group, chain)
    known = pool.table.has(key, block)
    if replace or (not known and pool.primary[block] is not None and pool.covered[block] < tokens):
        pool.drop_keys(block)
        known = False
    if known:
        return key
    pool.insert(key, block, tokens)
    if pool.records:
        span = request.tokens[tokens - hash_block_size : tokens]
        parent = request.keys[last - 1] if last else None
        pool.events.append(stored_event(request, group, [chain], [tokens], hash_block_size, span, parent))
    return key


def stored_event(
    request: Request,
    group: int,
    chains: Sequence[Chain],
    ends: Sequence[int],
    block_size: int,
    tokens: Sequence[int],
    parent: Chain | None,
) -> BlockStored:
    """The event that says that a request stored blocks; arguments as the attributes of `BlockStored`."""
    ahead = tuple(tuple(request.tokens[end : end + request.lookahead]) for end in ends)
    return BlockStored(
        group, tuple(chains), block_size, tokens, parent, tuple(ends), ahead, request.identity, request.session
    )
