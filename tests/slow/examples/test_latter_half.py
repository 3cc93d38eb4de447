"""A kind whose lookback depends on the length, by three files: what it reads, the plain rules, the compiled numbers."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

FILES = pathlib.Path(__file__).parent / "latter_half"
PROGRAM = """
import importlib, sys
import hkv.spec, hkv.dialects.vllm.kinds as compiled, reference.dialects.vllm.kinds as plain
files = sys.argv.pop(1)
for package, folder in ((hkv.spec, "spec"), (compiled, "compiled"), (plain, "plain")):
    package.__path__.append(f"{files}/{folder}")
importlib.import_module("hkv.spec.latter_half")
from hkv.cli import main
main()
"""


@pytest.mark.parametrize(
    "line",
    [
        "diff --engines numpy,jax --kinds latter_half,full_attention,sliding_window --seeds 3 --version 2",
        "watch numpy --kinds latter_half,full_attention --seeds 8 --feature core",
    ],
)
def test_both_forms_agree_and_keep_the_invariants(line: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(FILES), *line.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
