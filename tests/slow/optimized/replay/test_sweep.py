"""A compiled sweep in processes finds what the NumPy engine finds, with one program for all sizes of a line."""

import json

from click.testing import CliRunner

from hkv.cli import cli


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
