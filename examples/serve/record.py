"""Writes small random checkpoints as Hugging Face's `transformers` does, and what it computes with them.

Example, in an environment with transformers and PyTorch: python -m examples.serve.record tests/data/serve
"""

# PyTorch and transformers are in the environment that records, not in that of a type check.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import pathlib
import zlib
from typing import Any

import numpy as np

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 89,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 83,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
}

PROMPTS, PROMPT, NEW = 4, 37, 20
"""Prompts of each model, tokens of the longest, and tokens that are generated."""


def main() -> None:
    """Writes one folder a family: config.json, model.safetensors, and expected.npz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", choices=sorted(CONFIGS), action="append")
    arguments = parser.parse_args()
    for name in arguments.only or CONFIGS:
        record(arguments.folder / name, CONFIGS[name])


def record(folder: pathlib.Path, config: dict[str, Any]) -> None:
    """Writes one checkpoint, and the logits of greedy decoding with it.

    Args:
      folder: where.
      config: its `config.json`.
    """
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    read = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = np.random.default_rng(zlib.crc32(name.encode()))
            spread = 0.3 if parameter.ndim > 1 else 0.5
            parameter.copy_(torch.from_numpy(source.normal(0, spread, tuple(parameter.shape)).astype(np.float32)))
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    texts, logits = zip(*(_greedy(model, prompt) for prompt in _prompts(config["vocab_size"])), strict=True)
    lengths = np.array([len(text) - NEW for text in texts])
    width = max(map(len, texts))
    np.savez_compressed(
        folder / "expected.npz",
        prompts=lengths,
        tokens=np.stack([np.pad(text, (0, width - len(text)), constant_values=-1) for text in texts]),
        logits=np.stack([np.pad(found, ((0, width - len(found)), (0, 0))) for found in logits]).astype(np.float32),
    )
    print(f"{folder}: {sum(map(len, texts))} tokens, {model.num_parameters():,} parameters")


def _prompts(vocabulary: int) -> list[np.ndarray]:
    """Prompts that share beginnings of several lengths."""
    source = np.random.default_rng(7)
    base = source.integers(0, vocabulary, PROMPT)
    other = source.integers(0, vocabulary, PROMPT)
    return [base, np.concatenate([base[:24], other[:9]]), np.concatenate([base[:33], other[9:12]]), other[:18]]


def _greedy(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The text with `NEW` greedy tokens, and the logits of all its tokens."""
    import torch

    text = torch.from_numpy(prompt)[None]
    with torch.no_grad():
        for _ in range(NEW):
            found = model(text, use_cache=False).logits
            text = torch.cat([text, found[:, -1:].argmax(-1)], dim=1)
        found = model(text, use_cache=False).logits
    return text[0].numpy(), found[0].numpy()


if __name__ == "__main__":
    main()
