"""Campaigns of `benchmarks/mutation.py` and their page, questions to judges, and the engines' own kernels."""

from __future__ import annotations

import inspect
import json
import math
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import mutation
from benchmarks.engine_kernels import LMCacheTransfer
from benchmarks.judges.records import numbers, pack, ranges, unpack
from hkv.chunks.formats import EngineKVFormat
from hkv.chunks.kernel_groups import PageGeometry
from hkv.chunks.objects import Region
from hkv.chunks.transfer import Transfer

ROOT = pathlib.Path(__file__).parents[2]
EXPLAINED = tomllib.loads(mutation.EXPLAINED.read_text("utf-8"))
PAGE = (ROOT / "docs" / "explore.md").read_text("utf-8")


def test_modules_and_tests_are_there() -> None:
    for campaign in mutation.CAMPAIGNS:
        assert (ROOT / campaign.module).is_file()
        assert next(iter(campaign.trials(sample=True)))[0] == campaign.module
        for sample in (True, False):
            trials = list(campaign.trials(sample))
            assert campaign.module in [module for module, _ in trials]
            paths = {path for _, judge in trials for path in re.findall(r"tests/\S+", judge)}
            assert all((ROOT / path).exists() for path in paths), paths


def test_the_page_has_every_campaign_and_every_reason() -> None:
    modules = [campaign.module for campaign in (*mutation.CAMPAIGNS, mutation.IN_VLLM)]
    assert re.findall(r"^\| `([\w./]+)` \| `[^`]+` \| \d", PAGE, re.MULTILINE) == modules
    rows = {
        f"| `{module}` | {edit} | {why} |" for module, reasons in EXPLAINED.items() for edit, why in reasons.items()
    }
    table = PAGE[PAGE.index("| module | not noticed | why |") : PAGE.index(mutation.END)]
    assert set(table.splitlines()[2:]) == rows


def test_a_survivor_that_nothing_explains_is_shown() -> None:
    verdict = {"function": "f", "old": "<", "new": "<=", "outcome": "survived", "seconds": 1.0}
    made = {"module": "m.py", "judge": "j", "edits": 9, "judged": 3, "noticed": 1}
    made["verdicts"] = [verdict, verdict | {"outcome": "killed"}, verdict | {"outcome": "not reached"}]
    assert mutation._row(made) == "| `m.py` | `j` | 9 | 3 | 2 | 1 | 50 % | 3 |"
    assert list(mutation._survivors(made, {})) == [("f: `<` -> `<=`", "")]
    assert list(mutation._tables([made], {}))[-1] == "| `m.py` | f: `<` -> `<=` | **not explained** |"


# The engines' own kernels as the benchmark calls them.


GEOMETRIES = [
    PageGeometry(EngineKVFormat(1), 2, 3, 40, 4, 2, 8, "bfloat16"),
    PageGeometry(EngineKVFormat(3), 1, 2, 24, 8, 1, 36, "bfloat16"),
    PageGeometry(EngineKVFormat(12), 1, 3, 40, 4, 2, 16, "float16"),
]
BLOCKS = 3
"""Blocks of an object."""


@pytest.mark.lmcache
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operation", ["pack", "unpack"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: f"format {int(geometry.format)}")
def test_lmcache_moves_the_same_bytes(geometry, operation):
    rows = BLOCKS * geometry.slots
    shape = (geometry.kv_size, geometry.num_layers, rows, geometry.num_heads * geometry.head_size)
    region = Region(0, 0, rows, shape, geometry.dtype, math.prod(shape) * geometry.item_bytes)
    LMCacheTransfer(operation, Transfer(geometry, region)).verify()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_writes_with_these_arguments():
    from vllm import _custom_ops  # pyright: ignore[reportMissingImports]

    expected = ["key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"]
    assert list(inspect.signature(_custom_ops.reshape_and_cache_flash).parameters) == expected


# Questions to judges and their answers: children that end badly cost one answer, packed layers unpack.


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
