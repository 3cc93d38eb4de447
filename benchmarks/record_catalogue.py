"""Records what the catalogue of kvcache-simulator says models cache: `python benchmarks/record_catalogue.py`.

It needs `pip install kvcache-simulator==0.1.3`, a calculator of its own with the values of released models. For each
model the bytes that one more token adds for good, and those that a sequence holds besides, are told apart by asking for
two lengths: keys and values in two bytes an element, an indexer's keys in one, recurrent states as the model has them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
from typing import Any

TARGET = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "kvcache_simulator.json"

LENGTH = 1 << 20
"""Tokens that are longer than every window, and a multiple of every rate of compression."""


def recorded() -> dict[str, Any]:
    """Its answer for every model; `token_bytes` is null where its command line has no formula."""
    from kvcache_sim.calculator import calculate_cache_size, load_models_data  # type: ignore[import-not-found]

    data, found = load_models_data(), {}
    how = {"precision": "bf16_fp16", "indexer_precision": "fp8_int8", "include_linear_attention_state": True}
    for model in data["models"]:
        try:
            once, twice = (
                calculate_cache_size(model, tokens=tokens, models_data=data, **how).total_bytes
                for tokens in (LENGTH, 2 * LENGTH)
            )
        except ValueError:
            found[model["id"]] = {"formula": model["formula"], "token_bytes": None, "sequence_bytes": None}
            continue
        growth = (twice - once) / LENGTH
        found[model["id"]] = {
            "formula": model["formula"],
            "token_bytes": growth,
            "sequence_bytes": once - growth * LENGTH,
        }
    return {"version": importlib.metadata.version("kvcache-simulator"), "models": found}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    TARGET.write_text(json.dumps(recorded(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
