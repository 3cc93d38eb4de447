"""A dialect of two pools in a package of its own: every command of the oracle and of replay, with no file touched."""

from __future__ import annotations

import json
import pathlib

import pytest

from hkv.oracle.side import CACHED, HELD
from tests.examples.package import ROOT, hkv, installed
from tests.page.reading import data_of, drawn

PAIR = ("--dialect", "two-pools")
CACHE = (*PAIR, "--groups", "full:16,swa:16:48", "--tokens-per-id", "32")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return installed(ROOT / "examples" / "two_pool_dialect", tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Twenty prompts of 96 tokens under three beginnings, in turn."""
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    ids = [[place % 3, 3 + place % 3, 10 + place] for place in range(20)]
    rows = [
        {"timestamp": 2000 * place, "input_length": 96, "output_length": 8, "hash_ids": each}
        for place, each in enumerate(ids)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_logs_are_recorded_checked_and_explained(site, tmp_path):
    log = tmp_path / "log.jsonl"
    hkv(site, "record", *PAIR, "--feature", "core", "--seed", "2", "--steps", "6", "-o", log)
    header, *operations = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(header["num_blocks"]) == 2
    assert "1 of 1 logs agree with engine numpy" in hkv(site, "check", log)
    line = next(place for place, each in enumerate(operations, 2) if each["op"] == "admit" and each["want"]["hit"])
    told = json.loads(hkv(site, "explain", log, "--line", str(line), "--json", "-"))
    assert told["hit"] == operations[line - 2]["want"]["hit"] == min(group["largest"] for group in told["groups"])


def test_the_planted_defect_is_found_by_either_judge(site):
    found = json.loads(hkv(site, "diff", *PAIR, "--seeds", "40", "--json", "-", status=1))
    assert found["differences"]["core"]["operations"] <= 12
    assert "no invariant is broken" in hkv(site, "watch", "numpy", *PAIR, "--seeds", "20")
    assert "windows are there" in hkv(site, "watch", "careless", *PAIR, "--seeds", "60", status=1)


def test_a_small_cache_is_explored_to_its_end(site):
    space = ("--groups", "full:1,swa:1:2", "--num-blocks", "3", "--requests", "2", "--max-model-len", "2")
    done = json.loads(hkv(site, "explore", *PAIR, *space, "--json", "-"))
    assert done["exhausted"]
    assert done["counterexample"] is None
    assert min(done["evictions"], done["refusals"], done["states"] - 100) > 0


def test_a_page_shows_the_cache_that_was_explored_beside_the_reference(tmp_path):
    """One that takes no note of who reads a page hands out its window's block, where the reference refuses."""
    site = installed(ROOT / "examples" / "two_pool_dialect", tmp_path)
    for name, old, new in (
        ("dialect", "default_pair =", 'default_recorded = "careless"; default_pair ='),
        ("cache", "node.users[FULL] += users", "pass"),
    ):
        file = site / "two_pools" / f"{name}.py"
        file.write_text(file.read_text().replace(old, new))
    cache = ("--groups", "full:1,swa:1:2", "--num-blocks", "3", "--max-model-len", "2")
    files = ("--save", tmp_path / "log.jsonl", "--html", tmp_path / "page.html")
    hkv(site, "explore", *PAIR, *cache, *files, status=1)
    (case,) = data_of((tmp_path / "page.html").read_bytes())["cases"]
    assert case["headline"] == "broken: windows are there"
    assert case["marks"][0]["title"] == "careless breaks: windows are there"
    window = 3  # the first block of the second pool
    assert {name: cells[window][0] for name, cells in drawn(case).items()} == {"careless": HELD, "numpy": CACHED}


def test_every_prompt_token_has_a_cause(site, trace):
    done = json.loads(hkv(site, "replay", trace, *CACHE, "--num-blocks", "24,8", "--json", "-"))
    tokens = done["missed"]["tokens"]
    assert sum(tokens.values()) + done["totals"]["hit_tokens"] == done["totals"]["prompt_tokens"] == 20 * 96
    assert tokens["not told by the engine"] == 0 < tokens["evicted"]
    assert done["totals"]["blocks"] == 32
    assert [group["reasons"]["evicted"] > 0 for group in done["groups"]] == [False, True]


def test_a_sweep_goes_over_sizes_and_the_share_of_a_pool(site, trace):
    axes = ("--num-blocks", "32..96:3", "--window-share", "0.2,0.5")
    lines = json.loads(hkv(site, "sweep", trace, *CACHE, *axes, "--json", "-"))["lines"]
    assert [line["line"] for line in lines] == ["--window-share 0.2", "--window-share 0.5"]
    assert [[row["blocks"] for row in line["points"]] for line in lines] == [[32, 55, 96]] * 2
    assert lines[0]["points"][0]["hit_rate"] != lines[1]["points"][0]["hit_rate"]
    several = json.loads(hkv(site, "sweep", trace, *CACHE, "--num-blocks", "24,8;16,16", "--json", "-"))["lines"]
    assert [row["options"]["--num-blocks"] for row in several[0]["points"]] == ["24,8", "16,16"]


def test_two_dialects_are_held_against_each_other(site, trace):
    cache = ("--groups", "full:16,swa:16:16", "--tokens-per-id", "32", "--num-blocks", "64,64", "--engine", "numpy")
    both = ("--dialect", "two-pools,rtp-llm/hybrid-pool", "--window-share", "0.5")
    told = json.loads(hkv(site, "compare", trace, *cache, *both, "--json", "-"))
    assert told["replays"] == ["--dialect two-pools", "--dialect rtp-llm/hybrid-pool"]
    assert all(told["totals"]["hit_tokens"])


def test_what_it_has_not_is_refused(site, trace):
    for more in (("64",), ("64,64", "--lookahead", "2"), ("64,64", "--no-caching")):
        assert not hkv(site, "replay", trace, *CACHE, "--num-blocks", *more, status=2)
