"""Random configurations under RTP-LLM's rules, one family for each feature of its logs."""

from __future__ import annotations

from hkv.contract.traffic import Choices
from hkv.dialects.rtp_llm.config import HYBRID_POOL, NAMES, SINGLE
from hkv.dialects.rtp_llm.log.configuration import VERSION
from hkv.dialects.rtp_llm.log.structs import RtpGroup, RtpHeader
from hkv.errors import ConfigError

RTP_FEATURES = ("core", "tree", "fork", "connector", "context_parallel", "decode")
"""Features of traffic under RTP-LLM's rules; `docs/oplog.md` explains each."""

FULL, LINEAR, SWA = ("FULL", "LINEAR", "SWA")
"""Types of groups."""


def rtp_features(dialect: str) -> tuple[str, ...]:
    """Features of traffic under a dialect's rules; one group is not spread over ranks."""
    return RTP_FEATURES if dialect != SINGLE else RTP_FEATURES[:-2]


def draw_rtp_header(choices: Choices, feature: str, dialect: str) -> RtpHeader:
    """A configuration with small blocks and pools that are soon full.

    Args:
      choices: source of decisions.
      feature: one of `RTP_FEATURES`.
      dialect: one of `hkv.dialects.rtp_llm.config.NAMES`.

    Raises:
      ConfigError: unknown dialect, or a feature that it has not.
    """
    if dialect not in NAMES:
        raise ConfigError("dialect", dialect, f"one of {', '.join(NAMES)}")
    if feature not in rtp_features(dialect):
        raise ConfigError("feature", feature, f"one of {', '.join(rtp_features(dialect))} for {dialect}")
    size = choices.pick((1, 2, 4))
    ranks = choices.pick((2, 2, 4)) if feature in ("context_parallel", "decode") else 1
    own = 1 if feature == "decode" else ranks
    groups = [
        _group(choices, f"g{index}", kind, size, ranks, apart=dialect == HYBRID_POOL, checked=feature != "fork")
        for index, kind in enumerate(_types(choices, dialect))
    ]
    pools = len(groups) if dialect == HYBRID_POOL else 1
    least = 4 if pools > 1 else 3 + 2 * len(groups)
    tree = feature == "tree" or (feature != "core" and choices.chance(40))
    return RtpHeader(
        oplog=VERSION,
        dialect=dialect,
        feature=feature,
        num_blocks=[
            groups[index].explicit_block_num or choices.integer(least, choices.pick((8, 16, 40)) + least)
            for index in range(pools)
        ],
        groups=groups,
        block_size=size,
        linear_step=choices.integer(0, 3),
        reserve_blocks=choices.pick((0, 0, 1, 3)),
        prefix_tree=tree,
        independent_eviction=tree and choices.chance(50),
        cp_size=own,
        cp_rank=choices.integer(0, own - 1),
        prefill_cp_size=ranks if feature == "decode" else 1,
    )


def _types(choices: Choices, dialect: str) -> list[str]:
    """The types of the groups, at least one full group among them where one pool is shared."""
    if dialect == SINGLE:
        return [FULL]
    least = 0 if dialect == HYBRID_POOL else 1
    others = [choices.pick((LINEAR, SWA, LINEAR, SWA, FULL)) for _ in range(choices.integer(1, 2))]
    full = [FULL] if least or choices.chance(80) else []
    place = choices.integer(0, len(others))
    return [*others[:place], *full, *others[place:]]


def _group(choices: Choices, tag: str, kind: str, size: int, ranks: int, *, apart: bool, checked: bool) -> RtpGroup:
    mapping = None
    if kind == SWA and ranks > 1 and choices.chance(50):
        mapping = "NONE"
    compact = kind == SWA and ranks > 1 and mapping is None
    reuse = choices.chance(75) if kind == SWA else None
    if kind == FULL and choices.chance(4):
        reuse = False
    return RtpGroup(
        tag=tag,
        type=kind,
        block_size=size * (ranks if compact else 1),
        enable_prefix_reuse=reuse,
        evict_policy=choices.pick(("CHAIN", "INDEPENDENT")),
        explicit_block_num=choices.integer(6, 20) if apart and kind == SWA and choices.chance(20) else 0,
        active_tail_blocks=None if kind == FULL else choices.integer(0, 3),
        # A hit brings a window one block, and none without reuse. Upstream throws where two are to be there, after such
        # a hit and, with several sequences, after one that covers all that they share.
        validate_tail_blocks=kind != SWA or (checked and bool(reuse) and choices.chance(50)),
        cp_mapping=mapping,
    )
