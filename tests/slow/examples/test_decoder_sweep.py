"""Configurations in which each two of a few values meet give the logits of the pass without a cache; so the sweep says.

`python -m examples.hybrid_decoder.sweep` does it for many more values, and takes many minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import jax
import pytest
from click.testing import CliRunner

from examples.hybrid_decoder import sweep
from examples.hybrid_decoder.covering import covering
from examples.hybrid_decoder.model import Model
from hkv.errors import LayoutError

FEW = {
    "kinds": ("all",),
    "block": ("4", "4 and 8"),
    "chunk": ("1", "4 + 3"),
    "order": ("LBHNC", "BLNHC"),
    "split": (None, 1),
    "sums": ("exact",),
}


def wanted(row):
    """All but what `test_hybrid_decoder` serves already: whole blocks of four tokens."""
    return sweep.why_not(row) is None and (row["block"], row["split"]) != ("4", None)


SAMPLE = covering(FEW, 2, wanted)


@pytest.fixture
def compiled_fast():
    """Compiling takes most of the time, and no bit depends on how well it is done."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize("row", SAMPLE[1:], ids=lambda row: ", ".join(str(value) for value in row.values()))
def test_every_two_values_meet(row):
    check(sweep.verify(row), row)


def check(outcome, row):
    assert outcome.problems == []
    assert outcome.ulps == 0
    assert outcome.compared > 9000
    assert min(outcome.happened.values()) > 0
    assert len(outcome.happened) == (6 if row["chunk"] == "1" else 8)


@pytest.mark.usefixtures("compiled_fast")
def test_what_is_wrong_is_found():
    traffic = sweep.serve(SAMPLE[0])
    right = dataclasses.replace(sweep.model_of(SAMPLE[0]), block=4, blocks=())
    check(sweep.judged(traffic, right), SAMPLE[0])
    [problem] = sweep.judged(traffic, dataclasses.replace(right, window=sweep.WINDOW + 1)).problems
    assert "a logit differs by" in problem
    absent = traffic._replace(happened={**traffic.happened, "evictions": 0}, wrong=2, last=[])
    assert sweep.judged(absent, right).problems == [
        "no evictions",
        "2 reads of a wrong slot",
        "the same prompts gave other tokens",
    ]


def pairs(factors, row):
    return {frozenset(two) for two in itertools.combinations([(name, row[name]) for name in factors], 2)}


def test_every_two_values_that_can_meet_do():
    names = list(sweep.FACTORS)
    rows = [dict(zip(names, values, strict=True)) for values in itertools.product(*sweep.FACTORS.values())]
    allowed = [row for row in rows if sweep.why_not(row) is None]
    found = covering(sweep.FACTORS, 2, lambda row: sweep.why_not(row) is None)
    covered = set().union(*(pairs(names, row) for row in found))
    assert covered == set().union(*(pairs(names, row) for row in allowed))
    assert len(found) < len(allowed) / 20
    assert all(row in allowed for row in found)
    assert len(covering(sweep.FACTORS, len(names), lambda row: sweep.why_not(row) is None)) == len(allowed)


def test_orders_that_scatter_a_page_are_for_one_kind_alone():
    with pytest.raises(LayoutError, match="kinds share the pool"):
        Model(("full", "window")).layouts(4, "LHBNC", None)
    assert Model(("full",)).layouts(4, "LHBNC", None)


def test_the_command_says_what_failed_and_how_to_run_it_alone(monkeypatch, tmp_path):
    def verify(row):
        problems = ["no evictions"] if row["chunk"] == "7 + 2" else []
        return sweep.Outcome(100, 2.5, {"evictions": 0}, problems, 0.1)

    monkeypatch.setattr(sweep, "verify", verify)
    found = CliRunner().invoke(sweep.main, ["--strength", "1", "--json", str(tmp_path / "out")])
    assert found.exit_code == 1
    assert "--only 'chunk=7 + 2'" in found.output
    assert "no evictions" in found.output
    written = json.loads((tmp_path / "out").read_text())
    assert written["failed"] == sum(row["chunk"] == "7 + 2" for row in written["configurations"]) > 0
    assert written["compared"] == 100 * len(written["configurations"])
    assert CliRunner().invoke(sweep.main, ["--strength", "1", "--only", "chunk=16"]).exit_code == 0


@pytest.mark.parametrize("only", ["block", "rows=2", "block=3", "split=2 --only kinds=delta"])
def test_what_cannot_be_is_refused(only):
    found = CliRunner().invoke(sweep.main, ["--only", *only.split()])
    assert found.exit_code == 2
    assert "--only" in found.output
