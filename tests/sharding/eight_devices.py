"""Running tests in a process of eight forced CPU devices: XLA reads their number once, before anything else."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

FLAG = "--xla_force_host_platform_device_count=8"
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TIMEOUT = 300


def here() -> bool:
    """Whether this process was started with eight devices."""
    return FLAG in os.environ.get("XLA_FLAGS", "").split()


def environment(flag: str = FLAG) -> dict[str, str]:
    """This process's, with the flag, and without what pytest's plugins leave there for their own children."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_CORE_"))}
    return {**kept, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(), "JAX_PLATFORMS": "cpu"}


def run_tests(path: pathlib.Path) -> None:
    """Runs one file of tests there, and fails with its output if any of them fails or none runs."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} with XLA_FLAGS={FLAG}:\n{done.stdout}{done.stderr}"
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
