"""Search for stores that nothing comes of: a prompt is stored alone, the GPU is emptied, and the prompt comes again.

The reference's scheduler does it, at each length up to three chunks beyond the longest window, or at as many of them,
spread evenly, as are quick. A tier whose longest prompt does not fit is asked for prompts of up to twice its room.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from hkv.dialects.vllm.offload.capacity import longest_prompt
from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.version import check_reference

MOST_LENGTHS, MOST_TOKENS = 48, 1 << 16
"""Lengths that are asked for at most, and tokens of all of them together, but for eight lengths."""


def warnings(config: OffloadConfig, longest: int) -> list[str]:
    """Sentences on prompts of up to `longest` tokens that a tier stores and does not find again; none where it does.

    Raises:
      HKVError: the package `reference` is not installed.
    """
    found = [] if (text := _by_length(config, lengths_beyond_windows(config, longest))) is None else [text]
    if longest > (fits := longest_prompt(config, longest)):
        tried = sorted({fits + 1, min(longest, 2 * fits + 1)})
        if not all(hits := hits_again(config, tried)):
            found.append(
                f"prompts of more than {fits:,} tokens do not fit into {config.num_chunks:,} chunks: stored alone, "
                f"{_count(hits)} of {len(tried)} lengths, {' and '.join(f'{each:,}' for each in tried)} tokens, "
                f"{'is' if len(tried) == 1 else 'are'} hit again"
            )
    return found


def lengths_beyond_windows(config: OffloadConfig, longest: int) -> Sequence[int]:
    """Prompt lengths of the last three chunks up to three beyond the longest window, `longest` at most.

    None is so short that a hit would be less than a chunk of each group, those that a draft gives up aside.
    """
    sizes, specs = config.chunk_tokens, config.cache.topology.specs
    unit = max(sizes)
    dropped = unit + max((sizes[group] for group in config.eagle), default=0)
    least = 1 + max(-(-dropped // size) * size for size in sizes)
    window = max(0 if spec.reads_all else spec.most_read or 0 for spec in specs)
    last = min(longest, window + dropped + 2 * unit)
    first = max(least, last - 3 * unit + 1)
    count = min(last - first + 1, MOST_LENGTHS, max(8, MOST_TOKENS // max(1, last)))
    return [last - place * (last - first) // max(1, count - 1) for place in reversed(range(count))]


def hits_again(config: OffloadConfig, lengths: Sequence[int]) -> list[int]:
    """Tokens at which a prompt of each length resumes that such a tier stored, and nothing else."""
    return [_hit_again(_alone(config, tokens), tokens) for tokens in lengths]


def _by_length(config: OffloadConfig, lengths: Sequence[int]) -> str | None:
    """The share of lengths that hit in a tier of room, defects that alone keep one from it, and dense retention's."""
    roomy = dataclasses.replace(config, num_chunks=1 << 30)
    hits = hits_again(roomy, lengths)
    if all(hits):
        return None
    missed = lengths[hits.index(0)]
    mended = {name: dataclasses.replace(roomy, bugs=config.bugs - {name}) for name in sorted(config.bugs)}
    names = [name for name, without in mended.items() if any(hits_again(without, [missed]))]
    said = f"of {len(hits)} prompt lengths from {lengths[0]:,} to {lengths[-1]:,} tokens, {_count(hits)} are hit again"
    said += f" in the tier{f' ({names[0]})' if names else ''}"
    if config.cache.retention_interval is None:
        return said
    dense = dataclasses.replace(roomy, cache=dataclasses.replace(roomy.cache, retention_interval=None))
    return f"{said}; with dense retention {_count(hits_again(dense, lengths))}"


def _count(hits: Sequence[int]) -> int:
    return sum(map(bool, hits))


def _alone(config: OffloadConfig, tokens: int) -> OffloadConfig:
    """The configuration as far as one prompt by itself meets it, so that others with the same part share an answer."""
    room = tokens + 4 * (1 + config.drafts)
    blocks = sum(-(-room // size) + 4 for size in config.cache.block_sizes)
    chunks = sum(-(-tokens // size) for size in config.chunk_tokens) + len(config.chunk_tokens)
    cache = dataclasses.replace(
        config.cache, num_blocks=1 + blocks, max_model_len=max(room, config.cache.max_model_len)
    )
    alone = {"num_chunks": min(config.num_chunks, chunks), "workers": 1, "sync_tokens": 0, "most_running": 1}
    return dataclasses.replace(config, cache=cache, **alone)


@functools.lru_cache(maxsize=4096)
def _hit_again(config: OffloadConfig, tokens: int) -> int:
    check_reference()
    from hkv.dialects.vllm.offload.scheduler import OffloadScheduler

    scheduler, prompt = OffloadScheduler(config), range(tokens)
    for number in range(max(1, config.threshold)):
        scheduler.request(str(number), prompt, 1)
        while scheduler.requests or scheduler.connector.requests:
            scheduled = scheduler.schedule()
            orders = scheduled.orders
            loaded = [transfer.id for transfer in orders.loads if not transfer.within]
            scheduler.output(scheduled, {transfer.job: 1 for transfer in (*orders.loads, *orders.stores)}, loaded)
        scheduler.reset(preempt=False, tier=False)
    scheduler.request("again", prompt, 1)
    (match,) = scheduler.schedule().matches
    return match.local + (match.external or 0)
