"""Tokens that pools hold, and slots that a sequence misses, as RTP-LLM's scheduler asks for them. Host-only."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.dialects.rtp_llm.config import HYBRID_POOL, RtpConfig
from hkv.errors import ConfigError
from hkv.model.group_policy import GroupType


def tokens_of(config: RtpConfig, blocks: Sequence[int]) -> int:
    """Tokens that so many blocks hold, all ranks together (RTP-LLM `availableTokensNum` and its siblings).

    Over one pool, those of the first group's slots; with a pool a group, what every full group has room for, or every
    group if none is full.

    Args:
      config: the cache.
      blocks: a number of blocks for each pool, such as those that are free.

    Raises:
      ConfigError: not one number a pool.
    """
    if len(blocks) != len(config.num_blocks):
        raise ConfigError("blocks", list(blocks), f"one number for each of {len(config.num_blocks)} pools")
    if config.name != HYBRID_POOL:
        return sum(blocks) * _logical(config, 0)
    groups = range(len(config.policies))
    full = [group for group in groups if config.policies[group].group_type is GroupType.FULL]
    return min(blocks[group] * _logical(config, group) for group in full or groups)


def token_capacity(config: RtpConfig) -> int:
    """Tokens that the pools hold at most, context parallelism not counted (RTP-LLM `tokenCapacity`)."""
    usable = [count - 1 for count in config.num_blocks]
    if config.name != HYBRID_POOL:
        return sum(usable) * config.block_size
    sizes = [group.spec.block_size for group in config.topology.groups]
    return min(count * size for count, size in zip(usable, sizes, strict=True))


def slots_missing(config: RtpConfig, tokens: int, slots: Sequence[int], reserve: int) -> int:
    """Slots that one sequence misses, over all groups, holes included (RTP-LLM `singleBatchNeedBlocks`).

    Args:
      config: the cache.
      tokens: of the sequence.
      slots: those that it has in each group.
      reserve: tokens to come in a step beyond the next one's; for linear groups one more than slots.
    """
    missing = 0
    for policy, group, held in zip(config.policies, config.topology.groups, slots, strict=True):
        length = config.mapper.effective_tokens(tokens, config.mapper.mapping(policy))
        if policy.group_type is GroupType.LINEAR:
            wanted = -(-length // group.spec.block_size) + max(reserve - 1, 0)
        else:
            wanted = -(-(length + reserve) // group.spec.block_size)
        missing += max(wanted - held, 0)
    return missing


def _logical(config: RtpConfig, group: int) -> int:
    """Tokens of the sequence that one slot of a group stands for."""
    mapping = config.mapper.mapping(config.policies[group])
    return config.mapper.logical_block_size(mapping, config.topology.groups[group].spec.block_size)
