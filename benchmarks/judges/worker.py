"""A process that asks vLLM's classes: one question a line on its input, one answer a line on its output."""

from __future__ import annotations

import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from judges.vllm_classes import ModelClasses, Refused, silence  # noqa: E402


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is no answer
    silence()
    classes = ModelClasses()
    print(json.dumps({"architectures": sorted(classes.registry.ModelRegistry.models)}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = classes.answer(question["config"], question["tensor_parallel"])
        except Refused as refused:
            answer = {"refused": str(refused)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
