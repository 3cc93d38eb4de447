"""Projection of a rank's blocks for a connector: one key and one block per virtual block."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.dialects.rtp_llm.config import NULL, RtpConfig
from hkv.model.group_policy import CpMapping, CpSlice


def project(
    config: RtpConfig, keys: Sequence[int], lists: Sequence[Sequence[int]], selected: Sequence[int], *, aligned: bool
) -> tuple[list[int], list[list[int]]]:
    """A sequence under canonical keys (RTP-LLM `projectConnectorResource`): its keys, and each group's blocks.

    Connectors leave the last key of a sequence out unless it is aligned; where the partly filled block is on another
    rank than the last, its key is appended once more, so that no whole block is left out in its stead. No block belongs
    to that key.

    Args:
      config: groups and ranks.
      keys: the rank's sequence's, of all logical blocks.
      lists: its blocks in each group.
      selected: the canonical keys that are wanted.
      aligned: whether no key stands for a partly filled block.
    """
    mapper = config.mapper
    on_last_rank = (len(keys) - 1) % mapper.size == mapper.size - 1
    projected = list[list[int]]()
    for policy, blocks in zip(config.policies, lists, strict=True):
        positional = mapper.slice(policy) is not CpSlice.NONE
        if mapper.mapping(policy) is CpMapping.BLOCK_ROUND_ROBIN:
            positional = positional or len(blocks) <= len(selected) or len(blocks) < len(keys)
        picked = blocks if positional else mapper.canonical_keys(blocks)
        projected.append([*picked[: len(selected)], *[NULL] * (len(selected) - len(picked))])
    return [*selected, *(keys[-1:] if not aligned and not on_last_rank else [])], projected
