"""RTP-LLM's rules, compiled: one record for each allocator, which differ in data alone (`parameters.CacheField`)."""

from __future__ import annotations

from hkv.dialects.dialect import Rules, RuleSet
from hkv.dialects.rtp_llm.config import HYBRID, HYBRID_POOL, SINGLE
from hkv.dialects.rtp_llm.rules.admit import capacity
from hkv.dialects.rtp_llm.rules.evict import select
from hkv.dialects.rtp_llm.rules.insert import insert
from hkv.dialects.rtp_llm.rules.joint_hit import adopt
from hkv.dialects.rtp_llm.rules.lists import sweep
from hkv.dialects.rtp_llm.rules.malloc import malloc
from hkv.model.group_policy import GroupType


def _rule_set(name: str) -> RuleSet[GroupType]:
    return RuleSet(
        name=name,
        kinds={group_type.name: group_type for group_type in GroupType},
        rules=Rules(
            hit=adopt, admit=capacity, allocate=malloc, register=insert, retire=sweep, free=sweep, evict=select
        ),
    )


RTP_SINGLE, RTP_HYBRID, RTP_HYBRID_POOL = (_rule_set(name) for name in (SINGLE, HYBRID, HYBRID_POOL))
"""Each rule works on a `hkv.state.pooled_workspace.PooledWorkspace` under a `parameters.View`."""
