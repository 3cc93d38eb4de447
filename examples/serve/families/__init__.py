"""Families of models: each a function from tokens to logits, whose attention is handed to it."""

from __future__ import annotations

from typing import Any

from examples.serve.families import gemma3, gpt_oss, llama

FORWARD: dict[str, Any] = {"llama": llama.forward, "gemma3_text": gemma3.forward, "gpt_oss": gpt_oss.forward}
"""By the config's `model_type`."""
