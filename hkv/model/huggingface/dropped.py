"""Models that are refused by name: those that vLLM dropped, and those whose caches HKV has no kind for."""

from __future__ import annotations

from hkv.model.huggingface.family import words

SINCE = {
    "0.9.2": "phi3small",
    "0.10.2": "motif phi4flash",
    "0.22.0": "jais",
    "0.23.0": "xverse bamba minimax minimax_text_01 minimax_m1 baichuan qwen internlm",
    "0.24.0": "aquila grok-1",
    "0.25.0": "telechat",
    "0.26.0": "plamo2 ouro",
    "0.28.0": "arctic chameleon mpt",
}
"""Last version that served the types (vLLM 0.33 `_PREVIOUSLY_SUPPORTED_MODELS`)."""

DROPPED = {name: version for version, names in SINCE.items() for name in words(names)}
"""The last version of vLLM that served each."""

BORROWING = words("gemma4_assistant gemma4_unified_assistant")
"""Draft modules that cache nothing: every layer reads the caches of the model that they draft for."""
