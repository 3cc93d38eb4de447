"""A dialect in a package of its own, installed next to HKV: every command of the oracle works, with no file touched."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest

from tests.examples.package import ROOT, hkv, installed, run

PACKAGE = ROOT / "examples" / "toy_dialect"
MOST_LINES = 300


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return installed(PACKAGE, tmp_path_factory.mktemp("site"))


def test_a_whole_dialect_takes_at_most_300_lines():
    files = [PACKAGE / "pyproject.toml", *sorted((PACKAGE / "toy_dialect").glob("*.py"))]
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES


def test_hkv_does_not_know_it_without_the_package(tmp_path):
    done = hkv(tmp_path, "record", "--dialect", "toy-radix", "--feature", "core", "--seed", "0", "-o", "-", status=2)
    assert not done


@pytest.fixture(scope="module")
def recorded(site, tmp_path_factory):
    """A log of the dialect's own engine."""
    log = tmp_path_factory.mktemp("recorded") / "toy.jsonl"
    hkv(site, "record", "--dialect", "toy-radix", "--feature", "core", "--seed", "3", "--steps", "4", "-o", log)
    return log


def test_a_recorded_log_is_checked_and_explained(site, recorded):
    operations = [json.loads(line) for line in recorded.read_text().splitlines()][1:]
    assert "1 of 1 logs agree with engine numpy" in hkv(site, "check", recorded)
    line = next(index for index, each in enumerate(operations, 2) if each["op"] == "admit" and each["want"]["hit"])
    told = json.loads(hkv(site, "explain", recorded, "--line", str(line), "--json", "-"))
    assert told["hit"] == operations[line - 2]["want"]["hit"] == told["groups"][0]["largest"]
    assert told["departed"] is None


def test_a_log_of_somebody_else_is_told_to_depart(site, recorded, tmp_path):
    log = tmp_path / "toy.jsonl"
    lines = recorded.read_text().splitlines()
    changed = next(index for index, line in enumerate(lines) if '"blocks":[' in line)
    lines[changed] = lines[changed].replace('"blocks":[', '"blocks":[7,')
    log.write_text("\n".join(lines) + "\n")
    assert f"{log}:{changed + 1}: admit" in hkv(site, "check", log, status=1)
    told = json.loads(hkv(site, "explain", log, "--line", str(changed + 1), "--json", "-"))
    assert told["departed"] == changed + 1


def test_the_planted_defect_is_found_and_made_small(site, tmp_path):
    pair = ("--dialect", "toy-radix", "--engines", "forgetful,numpy", "--seeds", "30")
    whole = json.loads(hkv(site, "diff", *pair, "--no-shrink", "--save", tmp_path, "--json", "-", status=1))
    found = whole["differences"]["core"]
    small = tmp_path / "small.jsonl"
    hkv(site, "shrink", found["log"], "--engine", "forgetful", "-o", small)
    operations = len(small.read_text().splitlines()) - 1
    assert operations <= 12 < found["operations"]
    assert "agree with engine numpy" in hkv(site, "check", small)
    assert f"{small}:{operations + 1}: " in hkv(site, "check", small, "--engine", "forgetful", status=1)
    both = json.loads(hkv(site, "diff", *pair, "--json", "-", status=1))
    assert both["differences"]["core"]["operations"] == operations


def test_engines_that_are_equal_do_not_differ(site):
    printed = hkv(site, "diff", "--dialect", "toy-radix", "--engines", "numpy,numpy", "--seeds", "10")
    assert "no difference" in printed


def test_a_trace_is_replayed(site, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * index, "input_length": 96, "output_length": 8, "hash_ids": [1, 2, 10 + index]}
        for index in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cache = ("--dialect", "toy-radix", "--groups", "full:16", "--num-blocks", "20", "--tokens-per-id", "32")
    done = json.loads(hkv(site, "replay", trace, *cache, "--json", "-"))
    assert done["totals"]["finished"] == len(rows)
    assert done["requests"]["hit"] == [0, 64, 64, 64]
    refused = hkv(site, "replay", trace, *cache, "--eagle", "all", status=2)
    assert not refused


@pytest.mark.parametrize("line", ["return 1 // 0", "json = __import__('json'); return json.loads('no')"])
def test_an_error_of_the_dialect_is_one_line_with_its_name(site, tmp_path, line):
    shutil.copytree(site, tmp_path / "site")
    file = tmp_path / "site" / "toy_dialect" / "dialect.py"
    text = file.read_text()
    assert text.count('return ("core",)') == 1
    file.write_text(text.replace('return ("core",)', line))
    for command in (("record", "--feature", "core", "--seed", "0", "-o", "-"), ("diff", "--seeds", "1")):
        done = run(tmp_path / "site", *command, "--dialect", "toy-radix")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith("hkv: dialect toy-radix: ")
