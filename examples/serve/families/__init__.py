"""Families of models: each a function from tokens to logits, to which the step's cache is handed."""

from __future__ import annotations

from typing import Any

from examples.serve.families import deepseek_v3, gemma3, gpt_oss, jamba, llama, llama4, qwen3_next

FORWARD: dict[str, Any] = {
    "deepseek_v3": deepseek_v3.forward,
    "gemma3_text": gemma3.forward,
    "gpt_oss": gpt_oss.forward,
    "jamba": jamba.forward,
    "llama": llama.forward,
    "llama4_text": llama4.forward,
    "qwen3_next": qwen3_next.forward,
}
"""By the config's `model_type`."""
