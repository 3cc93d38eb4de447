"""Running tests in a process of eight forced CPU devices: XLA reads their number once, before anything else."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

NUMBER = "--xla_force_host_platform_device_count"
PATIENCE = ("--xla_cpu_collective_call_terminate_timeout_seconds=600", "--xla_cpu_collective_timeout_seconds=600")
"""XLA aborts the process where a device of a collective is 40 s late, as eight on two busy cores may be."""

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent.parent
TIMEOUT = 600


def _flags() -> list[str]:
    return os.environ.get("XLA_FLAGS", "").split()


def here() -> bool:
    """True if this process was started with eight devices."""
    return f"{NUMBER}=8" in _flags()


def environment(devices: int) -> dict[str, str]:
    """This process's, with that many devices, and without what pytest's plugins leave there for their children."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_CORE_"))}
    flags = [flag for flag in _flags() if not flag.startswith(NUMBER)]
    return {**kept, "XLA_FLAGS": " ".join([*flags, *PATIENCE, f"{NUMBER}={devices}"]), "JAX_PLATFORMS": "cpu"}


def run_tests(path: pathlib.Path) -> None:
    """Runs one file of tests there, and fails with its output if any of them fails or none runs."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(8), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)} with XLA_FLAGS={NUMBER}=8:\n{done.stdout}{done.stderr}"
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
