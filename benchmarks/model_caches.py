"""Records the second judge's answers: what `transformers` itself caches for configs that HKV plans and vLLM does not.

The configs are those of `tests/data/model_classes/library.jsonl` and `released.jsonl`, which `model_classes.py`
writes. Run it with the Python of an environment that has vLLM, of which transformers and PyTorch are parts.

Example:
  build/vllm/bin/python benchmarks/model_caches.py
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.judges.children import answers
from benchmarks.judges.recorded import FOLDER, Outcome, judge, recorded_cases, records
from benchmarks.judges.transformers_caches import UnjudgedError, cache_answer


def ask(config: Mapping[str, Any]) -> dict[str, Any]:
    """The library's caches, or why it was not judged."""
    try:
        return cache_answer(config)
    except UnjudgedError as error:
        return {"refused": str(error)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="that one config may take")
    parser.add_argument("--again", action="store_true", help="ask also of those that were refused")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    known = {record["name"]: record for record in records("caches")}
    cases = {name: case for name, case in recorded_cases().items() if judge(case, 1).outcome is Outcome.PLANNED_HERE}
    asked = [name for name in cases if name not in known or (arguments.again and "refused" in known[name]["answer"])]
    importlib.import_module("transformers")  # here, so that children need not
    origin = f"transformers {importlib.metadata.version('transformers')}"
    questions = ((name, functools.partial(ask, cases[name].config)) for name in asked)
    for name, answer in answers(questions, jobs=1, seconds=arguments.seconds):
        known[name] = {"name": name, "origin": origin, "answer": answer}
        print(name, json.dumps(answer)[:200], file=sys.stderr, flush=True)
        lines = [json.dumps(known[each], separators=(",", ":")) + "\n" for each in sorted(known)]
        (FOLDER / "caches.jsonl").write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
