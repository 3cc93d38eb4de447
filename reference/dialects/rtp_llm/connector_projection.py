"""Projection of a rank's blocks for a connector: one key and one block per virtual block."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.dialects.rtp_llm.config import NULL, RtpConfig
from hkv.model.group_policy import CpMapping, CpSlice
from reference.dialects.rtp_llm.resource import Resource


def project(config: RtpConfig, source: Resource, selected: Sequence[int]) -> Resource:
    """A sequence under canonical keys (RTP-LLM `projectConnectorResource`).

    Connectors leave the last key of a sequence out unless it is aligned; where the partly filled block is on another
    rank than the last, its key is appended once more, so that no whole block is left out in its stead. No block belongs
    to that key. The result is not marked canonical, as RTP-LLM sets its keys anew, which clears the mark.

    Args:
      config: groups and ranks.
      source: the rank's sequence, with the keys of all logical blocks.
      selected: the canonical keys that are wanted.
    """
    mapper = config.mapper
    on_last_rank = (len(source.keys) - 1) % mapper.size == mapper.size - 1
    keys = list(selected)
    if not source.aligned and not on_last_rank:
        keys.append(source.keys[-1])
    projected = Resource(config.topology, keys, aligned=source.aligned)
    for policy, target, blocks in zip(config.policies, projected.groups, source.groups, strict=True):
        positional = mapper.slice(policy) is not CpSlice.NONE
        if mapper.mapping(policy) is CpMapping.BLOCK_ROUND_ROBIN:
            positional = positional or len(blocks) <= len(selected) or len(blocks) < len(source.keys)
        picked = blocks.blocks if positional else mapper.canonical_keys(blocks.blocks)
        target.assign([*picked[: len(selected)], *[NULL] * (len(selected) - len(picked))])
    return projected
