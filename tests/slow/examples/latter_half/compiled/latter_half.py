"""Latter half under the compiled rules: one halving of the length, and a run from there on."""

from __future__ import annotations

from typing import Any, ClassVar

from hkv.spec.latter_half import LatterHalf

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds._attention import AttentionLayer


def parameters(config: VllmConfig, group: int, spec: LatterHalf, eagle: bool) -> dict[str, Any]:
    """One halving, and the most that admission counts."""
    del group, eagle
    most = config.max_model_len
    held = min(-(-most // 2) + config.in_flight_limit, most)
    return {"LOOKBACK": 0, "HALVINGS": 1, "NEED": 0, "CAP": -(-held // spec.block_size) + 1}


class LatterHalfLayer(AttentionLayer):
    """`LatterHalf` under vLLM 0.33."""

    of: ClassVar[Any] = LatterHalf
    log_version: ClassVar[int] = 2
    seeks_run: ClassVar[bool] = True
