"""vLLM 0.33 as compiled rules."""

from __future__ import annotations

from types import ModuleType

from hkv.dialects.dialect import Rules, RuleSet
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import NAME
from hkv.dialects.vllm.rules.admit import fits
from hkv.dialects.vllm.rules.allocate import grow
from hkv.dialects.vllm.rules.evict import evict
from hkv.dialects.vllm.rules.hit import longest_hit
from hkv.dialects.vllm.rules.register import register
from hkv.dialects.vllm.rules.retire import free, retire

RULES: RuleSet[ModuleType] = RuleSet(
    name=NAME,
    kinds=kinds.all_kinds(),
    rules=Rules(hit=longest_hit, admit=fits, allocate=grow, register=register, retire=retire, free=free, evict=evict),
)
"""The compiled rules; each works on a `hkv.state.workspace.Workspace` under a `parameters.View`."""
