"""Records what vLLM's own model classes cache, config by config: layers, blocks, tokens and the start-up line.

Each config is built by the class that vLLM 0.33.0 serves it with, on the meta device and with dummy weights, as on a
node of eight H100 (`judges/simulated_gpu.py`), at tensor parallel 1, 2 and 8. What cannot be built, or is not served, is
recorded with the reason. Run it with the Python of an environment that has vLLM (`benchmarks/make_vllm_environment.py`).

Examples:
  build/vllm/bin/python benchmarks/model_classes.py --library --output tests/data/model_classes/library.jsonl
  build/vllm/bin/python benchmarks/model_classes.py tests/data/models/llama.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator

from judges.default_configs import Case, architectures_of, library_cases
from judges.processes import Worker


def file_cases(paths: Iterable[pathlib.Path]) -> Iterator[Case]:
    """Configs in files; where one names no architecture, the class that transformers has for its type."""
    for path in paths:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not config.get("architectures"):
            config["architectures"] = architectures_of(config.get("model_type", ""))[:1]
        yield Case(path.stem, config, str(path))


def judged(case: Case, worker: Worker, ranks: Iterable[int]) -> dict[str, object]:
    """A case with vLLM's answer for each number of tensor-parallel ranks."""
    answers = {str(rank): worker.ask(case.config, rank) for rank in ranks}
    return {"name": case.name, "origin": case.origin, "config": case.config, "answers": answers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", type=pathlib.Path, help="config.json files")
    parser.add_argument("--library", action="store_true", help="every config class of transformers, default values")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these cases alone; repeatable")
    parser.add_argument("--ranks", default="1,2,8", help="tensor-parallel ranks")
    parser.add_argument("--seconds", type=float, default=120.0, help="that one answer may take")
    parser.add_argument("--output", type=pathlib.Path, help="write the answers here, one case a line")
    arguments = parser.parse_args()
    ranks = [int(rank) for rank in arguments.ranks.split(",")]
    worker = Worker(arguments.seconds)
    worker.start()
    cases = list(file_cases(arguments.configs))
    if arguments.library:
        cases += library_cases(worker.architectures)
    lines = []
    for case in cases:
        if arguments.only and case.name not in arguments.only:
            continue
        record = judged(case, worker, ranks)
        lines.append(json.dumps(record, separators=(",", ":"), sort_keys=False))
        answers = record["answers"]
        said = {rank: answer.get("refused", answer.get("plan", {}).get("line")) for rank, answer in answers.items()}
        print(case.name, json.dumps(said), file=sys.stderr, flush=True)
        if arguments.output:
            arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not arguments.output:
        print("\n".join(lines))
    worker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
