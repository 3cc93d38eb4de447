"""Asks XLA:CPU to compile programs in the least time: a test runs most of its programs once or twice."""

from __future__ import annotations

import importlib.metadata
import os

CHEAPEST = "--xla_backend_optimization_level=0"
PLAIN_FUSIONS = "--xla_cpu_use_fusion_emitters=false"
"""Fusions by LLVM alone, without MLIR: a third of the time. Releases from 0.11 on have no such flag, and end over one
that they do not know."""


def flags() -> tuple[str, ...]:
    """Those that the installed release knows."""
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    return (CHEAPEST, PLAIN_FUSIONS) if (int(major), int(minor)) < (0, 11) else (CHEAPEST,)


def enable() -> None:
    """Adds the flags to `XLA_FLAGS`, for this process and those that it starts; before JAX is first used."""
    wanted = [flag for flag in flags() if flag not in os.environ.get("XLA_FLAGS", "").split()]
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *wanted])


def is_enabled() -> bool:
    """True if this process was asked to."""
    return CHEAPEST in os.environ.get("XLA_FLAGS", "").split()
