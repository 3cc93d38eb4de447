"""Commands are loaded, and refuse what makes no sense, before JAX is."""

from __future__ import annotations

import subprocess
import sys

from hkv.cli import COMMANDS

NEEDS_JAX = ("explore",)
"""Its state space is described in the compiled cache's own terms."""


def test_no_command_loads_jax_before_it_runs() -> None:
    names = [f"hkv.cli.{name.replace('-', '_').replace(' ', '_')}" for name in COMMANDS if name not in NEEDS_JAX]
    loaded = f"[name for name in {names} if importlib.import_module(name) and 'jax' in sys.modules]"
    code = f"import importlib, sys; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
