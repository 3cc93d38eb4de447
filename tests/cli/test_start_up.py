"""Commands are loaded, and refuse what makes no sense, before JAX is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hkv.cli import COMMANDS

NEEDS_JAX = ("explore",)
"""Its state space is described in the compiled cache's own terms."""


def test_no_command_loads_jax_before_it_runs() -> None:
    names = [f"hkv.cli.{name.replace('-', '_').replace(' ', '_')}" for name in COMMANDS if name not in NEEDS_JAX]
    loaded = f"[name for name in {names} if importlib.import_module(name) and 'jax' in sys.modules]"
    code = f"import importlib, sys; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Every command comes up where only the base packages are installed.

EXTRAS = ("safetensors", "zmq", "matplotlib", "blake3", "xxhash", "hypothesis", "tokenizers", "zstandard")

BASE_INSTALL = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS}))  # as if they were not installed
import click
from hkv.cli import COMMANDS, cli
print(*(name for name in COMMANDS if cli.get_command(click.Context(cli), name)), sep="\\n")
"""


def test_every_command_comes_up_without_any_extra():
    done = subprocess.run([sys.executable, "-c", BASE_INSTALL], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == list(COMMANDS)


@pytest.mark.parametrize("line", [("layout", "--spec", "full:16"), ("plan", "gpt-oss-20b", "--memory", "80GiB")])
def test_descriptions_import_no_arrays(line: tuple[str, ...]) -> None:
    loaded = "sorted({'jax', 'jaxlib', 'chex', 'numpy', 'torch'} & sys.modules.keys())"
    code = f"import sys; from hkv.cli import cli; cli.main({list(line)}, standalone_mode=False); print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
