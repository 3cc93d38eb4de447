"""Defaults that vLLM 0.33's server takes from the device it runs on.

`EngineArgs.get_batch_defaults` (vLLM 0.33 `engine/arg_utils.py`), for `vllm serve` (`UsageContext.OPENAI_API_SERVER`):
devices of 160 GiB or more, of 70 GiB or more but no A100, and all others.
"""

from __future__ import annotations

LARGEST, LARGE, OTHER = (16384, 1024), (8192, 1024), (2048, 256)
"""`max_num_batched_tokens` and `max_num_seqs` of the three."""

DEVICES = {
    "b200": LARGEST,
    "b300": LARGEST,
    "mi300x": LARGEST,
    "mi325x": LARGEST,
    "mi355x": LARGEST,
    "h100": LARGE,
    "h200": LARGE,
    "h20": LARGE,
    "gh200": LARGE,
    "a100": OTHER,
    "a10g": OTHER,
    "l4": OTHER,
    "l40s": OTHER,
    "gb10": OTHER,
}
"""Most tokens of a step and most requests running, by device."""
