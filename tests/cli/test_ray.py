"""`hkv sweep --ray` and `hkv diff --ray`: a local Ray finds what processes here find."""

import importlib
import json

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.cli.diff import command as diff
from hkv.errors import ConfigError, EngineFailure, MissingExtraError
from hkv.oracle import comparison as module
from hkv.oracle.comparison import Comparison, compare_in_cluster
from hkv.oracle.record import Only
from tests.cli.test_sweep import SWEPT, run, trace  # noqa: F401 - a fixture


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_local_ray_finds_the_same(trace):  # noqa: F811
    found = [
        json.loads(run("sweep", trace, *SWEPT, "--json", "-", *how).stdout)["lines"]
        for how in (("--ray", "local"), ("--jobs", "1"))
    ]
    assert found[0] == found[1]


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_nobody_listens(trace):  # noqa: F811
    with pytest.raises(ConfigError, match=r"ray = .*127\.0\.0\.1:1"):
        run("sweep", trace, *SWEPT, "--ray", "127.0.0.1:1")


def test_without_ray_the_extra_is_named(trace, monkeypatch):  # noqa: F811
    there = importlib.import_module

    def absent(name):
        if name == "ray":
            raise ImportError(name)
        return there(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"hkv\[ray\]"):
        run("sweep", trace, *SWEPT, "--ray", "local")


def test_a_cluster_has_its_own_processes(trace):  # noqa: F811
    done = CliRunner().invoke(cli, ["sweep", trace, *SWEPT, "--ray", "local", "--jobs", "2"])
    assert done.exit_code == 2
    assert "--ray" in done.stderr


OPTIMIST = "tests.oracle.test_shrink:Optimist,numpy"
CAMPAIGN = ("--engines", OPTIMIST, "--feature", "core", "--feature", "eagle", "--seeds", "60", "--json", "-")


def compared(*how):
    done = CliRunner().invoke(diff, [*CAMPAIGN, *how])
    assert done.exit_code == 1, done.output
    return json.loads(done.stdout)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_local_ray_finds_the_same_differences():
    assert compared("--ray", "local") == compared()


def stepwise(work, items, shared, address):
    """A cluster whose machines answer in the wrong order."""
    assert address == "local"
    yield from ((place, work(items[place], shared)) for place in reversed(range(len(items))))


def test_stretches_are_counted_as_one_process_counts(monkeypatch):
    """Seeds after a difference count nowhere, whatever other machines find there."""
    monkeypatch.setattr(module, "in_cluster", stepwise)
    found = compared("--ray", "local")
    assert found == compared()
    assert len(found["differences"]) == 2


def test_a_difference_that_is_not_found_again_is_said(monkeypatch):
    comparison = Comparison(("numpy", "numpy"), Only())
    monkeypatch.setattr(module, "in_cluster", stepwise)
    elsewhere = (tuple(OPTIMIST.split(",")), Only())
    with pytest.raises(EngineFailure, match="seed = "):
        compare_in_cluster(comparison, elsewhere, ["core"], range(60), "local")
