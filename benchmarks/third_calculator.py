"""Answers of kvcache-simulator for released models next to HKV's: equal, or different for a reason that is counted."""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

from hkv.errors import HKVError
from hkv.model.huggingface import Model, read_model
from hkv.model.released import Released, released_models

RECORDED = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "kvcache_simulator.json"

NAMES = {
    "cohere-command-a-03-2025": "command-a",
    "cohere-command-r-plus": "command-r-plus",
    "cohere-command-r-v01": "command-r",
    "cohere-command-r7b-12-2024": "command-r7b",
}
"""HKV's names of models that the catalogue calls otherwise."""

SCALE = 4
"""Bytes of the scale next to an indexer's key."""

LATENT, PACKED, KEY = 512 * 2, 584, 128
"""Bytes of a latent of DeepSeek-V4 in bfloat16, as vLLM packs it, and of an indexer's key."""


def recorded() -> dict[str, dict[str, Any]]:
    """Answers by HKV's name of the model, those without a formula left out."""
    answers = json.loads(RECORDED.read_text(encoding="utf-8"))["models"]
    return {str(NAMES.get(name, name)): answer for name, answer in answers.items() if answer["token_bytes"] is not None}


def compared() -> dict[str, str | None]:
    """The outcome by model, of those that both know: empty if equal, a reason, or None for a difference without one."""
    answers, found = recorded(), {}
    for released in released_models():
        answer = next((answers[name] for name in sorted(released.names) if name in answers), None)
        if answer is None:
            continue
        try:
            found[released.name] = outcome(answer, read_model(released.config()), released)
        except HKVError:
            continue  # HKV refuses it: nothing to compare
    return found


def outcome(answer: dict[str, Any], model: Model, released: Released) -> str | None:
    """The reason for a difference; empty if they agree, None if it is not one of those known."""
    token, sequence = float(model.token_bytes), model.resident_bytes
    if (token, sequence) == (answer["token_bytes"], answer["sequence_bytes"]):
        return ""
    indexers = sum(layer.name.endswith(".indexer") for layer in model.layers if layer.spec is not None)
    if answer["formula"] == "dsa_mla" and token - answer["token_bytes"] == SCALE * indexers:
        return f"it leaves out the scales beside the keys of {indexers} indexers, {SCALE} bytes each"
    if model.model_type == "cohere2" and sequence - answer["sequence_bytes"] == _window_token(model):
        return "vLLM gives windows of Cohere 2 a token more than the config"
    if answer["formula"] == "deepseek_v4_hybrid" and _packed(answer, token, released.config()):
        return f"it keeps latents in {LATENT:,} bytes, vLLM packs them into {PACKED}; it leaves out compressors' states"
    return None


def _window_token(model: Model) -> int:
    """Bytes of one token in all windows."""
    specs = model.specs.values()
    return sum(spec.unpadded_page_size_bytes // spec.block_size for spec in specs if spec.slides)


def _packed(answer: dict[str, Any], token: float, config: dict[str, Any]) -> bool:
    """True if both are the sum over the same layers, of plain latents and keys there, of packed ones here."""
    rates = collections.Counter(rate for rate in config["compress_ratios"][: config["num_hidden_layers"]] if rate)
    plain = sum(count * (LATENT + KEY * (rate == 4)) / rate for rate, count in rates.items())
    packed = sum(count * (PACKED + (KEY + SCALE) * (rate == 4)) / rate for rate, count in rates.items())
    return (answer["token_bytes"], token) == (plain, packed)
