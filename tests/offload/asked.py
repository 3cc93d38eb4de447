"""Single rules of the second tier's text, asked about a request whose keys are its places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.offload.connector import Connector, Offloading
from reference.dialects.vllm.offload.lookup import external_hit, load_window
from reference.dialects.vllm.offload.offers import offer
from reference.dialects.vllm.request import Request
from reference.language import NOTHING


def arrived(config: OffloadConfig, tokens: int, shared: int = 0) -> tuple[Connector, Offloading]:
    """A request of so many tokens behind a tier that has nothing."""
    connector = Connector(config)
    keys = list(range(tokens // config.cache.hash_block_size))
    connector.arrive(Request("a", tokens, tokens, keys, shared_prefix=shared))
    return connector, connector.requests["a"]


def offered_chunks(config: OffloadConfig, tokens: int, group: int, chunks: int, shared: int = 0) -> list[int]:
    """Chunks of a group that a request which goes on offers, of so many that may be stored."""
    connector, state = arrived(config, tokens, shared)
    tier, size, per_chunk = connector.tier, config.chunk_tokens[group], config.blocks_per_chunk
    connector.make_room([state], 0)
    state.row.blocks[:] = [1] * (chunks * per_chunk * len(config.chunk_tokens))
    state.row.held[group] = chunks * per_chunk
    count = offer(tier, state.row, tier.groups[group + 1], chunks, tokens // size, 0)
    return [use.end // size - 1 for use in tier.payload[:count]]


def found(
    config: OffloadConfig, present: Callable[[int, int], bool], tokens: int, local: int
) -> tuple[int | None, list[tuple[int, int]]]:
    """Tokens beyond a hit on the GPU that can be loaded, where chunks of groups are there or not; of each group, the
    chunks that are loaded then."""
    connector, state = arrived(config, tokens)
    for group, size in enumerate(config.chunk_tokens):
        unit = config.cache.hash_block_size
        for place in range(tokens // size):
            connector.pool.key(((place + 1) * size // unit - 1, group)).chunk = int(present(place, group))
    state.row.local = local
    hit = external_hit(connector.tier, state.row)
    return None if hit == NOTHING else hit, _loaded(connector, local, local + hit) if hit > 0 else []


def _loaded(connector: Connector, local: int, end: int) -> list[tuple[int, int]]:
    """Chunks, and their groups, that a load from one length to another reads, were nothing of them on the GPU."""
    wanted = list[tuple[int, int]]()
    for group in connector.tier.groups[1:]:
        places: Sequence[int] = range(local // group.chunk, -(-end // group.chunk))
        wanted += [(place, group.index) for place in (places[-load_window(group, end) :] if group.window else places)]
    return wanted
