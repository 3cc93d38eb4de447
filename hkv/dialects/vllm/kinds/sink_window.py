"""Attention sinks plus a window under the rules of vLLM 0.33, which lacks it: the sinks, and a run for the window."""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.config import VllmConfig
from hkv.spec.sink_window import SinkWindow


def parameters(config: VllmConfig, group: int, spec: SinkWindow, eagle: bool) -> dict[str, Any]:
    """The window's reach, the blocks it needs, and the most that admission counts, the sinks' among them."""
    del group, eagle
    block, reach = spec.block_size, spec.window - 1
    in_flight = min(reach + config.in_flight_limit, config.max_model_len)
    sinks, need = -(-spec.sink_len // block), -(-reach // block)
    return {"REACH": reach, "NEED": need or -1, "CAP": sinks - (-in_flight // block) + 1}
