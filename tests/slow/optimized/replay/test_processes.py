"""Compiled replays in several processes: a sweep finds as much as NumPy does, and kept executables say the same."""

from __future__ import annotations

import json
import subprocess
import sys

from click.testing import CliRunner

from hkv.cli import cli
from hkv.machine.kept_programs import SUFFIX


def test_processes_and_compiled_programs_find_the_same(tmp_path):
    trace = str(tmp_path / "trace.jsonl")
    made = ["trace", "chat", "--requests", "10", "--rate", "20", "--prompt-tokens", "60", "--tokens-per-id", "16"]
    assert CliRunner().invoke(cli, [*made, "-o", trace]).exit_code == 0
    swept = [
        "sweep",
        trace,
        "--groups",
        "full:16,swa:16:64",
        "--num-blocks",
        "200..2000:3",
        "--json",
        "-",
        "--jobs",
        "2",
    ]
    found = []
    for engine in ("jax", "numpy"):
        done = CliRunner().invoke(cli, [*swept, "--engine", engine], catch_exceptions=False)
        found.append(json.loads(done.stdout)["lines"])
    assert found[0] == found[1]
    assert len({point["hit_tokens"] for point in found[0][0]["points"]}) > 1


def test_they_are_the_same_programs_in_every_process(tmp_path):
    """Also when they are made again beside JAX's own cache, whose executables cannot be written once more.

    There are two: samples look at every block of a pool, so that the replay and the one that evicts nothing, which
    tells causes of misses, have each the program of its own pool's size.
    """
    cache, trace, report = tmp_path / "cache", tmp_path / "chat.jsonl", tmp_path / "report.json"
    hkv = [sys.executable, "-m", "hkv", "--compilation-cache", str(cache)]
    subprocess.run([*hkv, "trace", "chat", "--requests", "40", "-o", str(trace)], check=True, capture_output=True)
    command = [*hkv, "replay", str(trace), "--groups", "full:16,swa:16:128", "--num-blocks", "400"]

    def replayed() -> object:
        subprocess.run([*command, "--json", str(report)], check=True, capture_output=True, timeout=300)
        found = json.loads(report.read_text())
        del found["totals"]["seconds"]
        return found

    def kept() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in cache.glob(f"*{SUFFIX}")}

    first, made = replayed(), kept()
    assert len(made) == 2
    assert replayed() == first
    assert kept() == made
    for name in made:
        (cache / name).unlink()
    assert replayed() == first
    again = kept()
    assert again.keys() == made.keys()
    assert replayed() == first
    assert kept() == again
