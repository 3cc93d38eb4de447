"""Questions to judges and their answers: children that end badly cost one answer, packed layers unpack."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.judges.records import numbers, pack, ranges, unpack

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUESTIONS = """
import json, os, time
from benchmarks.judges.children import answers
def fails(): raise ValueError("no answer")
def ends(): os._exit(3)
def hangs(): time.sleep(60)
asked = {"answers": lambda: {"value": 1}, "ends": ends, "fails": fails, "hangs": hangs}
print(json.dumps(dict(answers(asked.items(), jobs=2, seconds=2.0))))
"""


def test_a_child_that_ends_or_hangs_costs_its_own_answer() -> None:
    done = subprocess.run([sys.executable, "-c", QUESTIONS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "answers": {"value": 1},
        "ends": {"refused": "process: ended with 3"},
        "fails": {"refused": "process: ended with 1"},
        "hangs": {"refused": "process: no answer within 2 s"},
    }


@given(st.sets(st.integers(0, 200)))
def test_ranges_are_the_numbers(found: set[int]) -> None:
    assert list(numbers(ranges(sorted(found)))) == sorted(found)


@given(st.dictionaries(st.integers(0, 40), st.sampled_from(["full", "window", "state"]), min_size=1))
def test_packed_layers_unpack(kinds: dict[int, str]) -> None:
    layers = {f"model.layers.{index}.attn": {"kind": kinds[index]} for index in sorted(kinds)}
    layers["model.layers.0.indexer"] = {"kind": "indexer"}
    assert unpack(pack(layers)) == layers
