"""The register of the invariants of vLLM 0.33's logs."""

from __future__ import annotations

from hkv.dialects.vllm.config import NAME
from hkv.oracle.invariant import Register

INVARIANTS = Register(NAME)
"""Every invariant of vLLM's operation log, by name. Those with a `start` have to be begun; `Watch` does."""

invariant = INVARIANTS.invariant
remembering = INVARIANTS.remembering
