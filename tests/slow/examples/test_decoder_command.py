"""The example's command: what it prints and writes, and how it fails."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from examples.hybrid_decoder import command
from examples.hybrid_decoder.serving import Decoder

SMALL = ["--layers", "window", "--rows", "1", "--requests", "1", "--prompt", "9", "--new", "5", "--drafts", "0"]


def run(*arguments):
    return CliRunner().invoke(command.main, [*SMALL, "--chunk", "1", *arguments])


def test_it_serves_verifies_and_draws(tmp_path):
    found = run("--verify", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    assert found.exit_code == 0, found.output
    assert "largest difference of a logit" in found.output
    assert json.loads((tmp_path / "out.json").read_text())["largest_difference_ulps"] <= 256
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [1e-2, np.nan])
def test_a_wrong_logit_is_an_exit_status(monkeypatch, wrong):
    collect = Decoder.collect

    def changed(self, row, request):
        collect(self, row, request)
        request.logits[len(request.tokens) - 2, 0] += wrong

    monkeypatch.setattr(Decoder, "collect", changed)
    found = run("--verify")
    assert found.exit_code == 1
    assert "the cache is wrong" in found.output


@pytest.mark.parametrize("arguments", [["--plot", "x.gif"], ["--layers", "conv"], ["--rows", "0"], ["--order", "XYZ"]])
def test_misuse_is_named(arguments):
    found = run(*arguments)
    assert found.exit_code == 2
    assert arguments[1] in found.output


def test_a_file_that_cannot_be_written_is_named():
    found = run("--json", "/proc/none/out")
    assert found.exit_code == 2
    assert "/proc/none/out" in found.output
