"""Limits of one request: the lengths and modes that decide how many blocks it can come to hold."""

from __future__ import annotations

import dataclasses

from hkv.errors import SpecError
from hkv.limits import MAX_RANKS, check_positive

MAMBA_MODES = ("align", "none")
"""`align`: states are kept at block boundaries for reuse; `none`: one running state (vLLM 0.33 `mamba_cache_mode`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The lengths that bound one request.

    Attributes:
      max_model_len: tokens of the longest request, prompt and output together.
      max_in_flight_tokens: tokens that may be scheduled but not yet settled, over the whole batch.
      max_num_encoder_input_tokens: tokens of encoders' inputs in one step; in vLLM 0.33 as many as a step has.
      context_parallel: ranks over which `cp_sharded` layers split their tokens.
      mamba_mode: one of `MAMBA_MODES`.
    """

    max_model_len: int
    max_in_flight_tokens: int = 8192
    max_num_encoder_input_tokens: int = 8192
    context_parallel: int = 1
    mamba_mode: str = "align"

    def __post_init__(self) -> None:
        check_positive(self, "max_model_len", "max_in_flight_tokens", "max_num_encoder_input_tokens")
        check_positive(self, "context_parallel", most=MAX_RANKS)
        if self.mamba_mode not in MAMBA_MODES:
            raise SpecError("mamba_mode", self.mamba_mode, f"one of {', '.join(MAMBA_MODES)}")

    def with_max_model_len(self, max_model_len: int) -> RequestLimits:
        """The same limits for another longest request."""
        return dataclasses.replace(self, max_model_len=max_model_len)
