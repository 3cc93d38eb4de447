"""Records what an installed vLLM 0.33 answers for random layouts: python -m benchmarks.record_layouts [COUNT]."""

from __future__ import annotations

import json
import os
import pathlib
import sys

from benchmarks.installed_layouts import InstalledLayouts, random_cases

TARGET = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "layouts" / "vllm-0.33.json"


def main(count: int) -> None:
    installed = InstalledLayouts()
    records = [{"case": case, "answer": installed.answer(case)} for case in random_cases(count)]
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    draft = TARGET.with_suffix(".tmp")
    lines = ",\n".join(json.dumps(record, separators=(",", ":")) for record in records)
    draft.write_text(f"[\n{lines}\n]\n")
    os.replace(draft, TARGET)
    refused = sum("refused" in record["answer"] for record in records)
    print(f"{TARGET}: {len(records)} layouts, {refused} of them refused")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
