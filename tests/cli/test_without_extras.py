"""Every command comes up where only the base packages are installed."""

from __future__ import annotations

import subprocess
import sys

from hkv.cli import COMMANDS

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
