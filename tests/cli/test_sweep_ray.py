"""`hkv sweep --ray`: a local Ray finds what processes find."""

import importlib
import json

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.errors import ConfigError, MissingExtraError
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
