"""Projection of a rank's blocks for a connector: one key and one block per virtual block. Host-only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hkv.dialects.rtp_llm.config import NULL, RtpConfig
from hkv.model.group_policy import CpMapping, CpSlice


class Projection(NamedTuple):
    """A sequence under canonical keys.

    Attributes:
      keys: its keys, that of a partly filled block among them where it stands last as a mark.
      aligned: whether no key stands for a partly filled block.
      blocks: for each group its block under each key, -1 for none.
    """

    keys: list[int]
    aligned: bool
    blocks: list[list[int]]


def project(
    config: RtpConfig, keys: Sequence[int], blocks: Sequence[Sequence[int]], selected: Sequence[int], *, aligned: bool
) -> Projection:
    """A rank's sequence as connectors take it (RTP-LLM `projectConnectorResource`).

    Connectors leave the last key of a sequence out unless it is aligned. Where the partly filled block is on another
    rank than the last, its key is appended once more, so that no whole block is left out in its stead.

    Args:
      config: groups and ranks.
      keys: of all the sequence's logical blocks.
      blocks: the rank's list of each group, -1 for holes.
      selected: the canonical keys that are wanted.
      aligned: whether no key stands for a partly filled block.
    """
    mapper, wanted = config.mapper, list(selected)
    if not aligned and len(keys) % mapper.size != 0:
        wanted.append(keys[-1])
    return Projection(
        wanted, aligned, [_picked(config, group, listed, len(wanted), len(keys)) for group, listed in enumerate(blocks)]
    )


def _picked(config: RtpConfig, group: int, listed: Sequence[int], wanted: int, keys: int) -> list[int]:
    """A group's blocks, one for each wanted key: as they are listed, or those of the last rank's keys."""
    policy, mapper = config.policies[group], config.mapper
    in_place = mapper.slice(policy) is not CpSlice.NONE
    if mapper.mapping(policy) is CpMapping.BLOCK_ROUND_ROBIN:
        in_place = in_place or len(listed) <= wanted or len(listed) < keys
    taken = (listed if in_place else mapper.canonical_keys(listed))[:wanted]
    return [*taken, *[NULL] * (wanted - len(taken))]
