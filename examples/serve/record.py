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

from examples.serve.configs import CONFIGS

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
        # A buffer of the checkpoint is DeepSeek's bias of scores.
        biases = [each for each in model.named_buffers() if each[0].endswith("bias")]
        for name, parameter in [*model.named_parameters(), *biases]:
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
