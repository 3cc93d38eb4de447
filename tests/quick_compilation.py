"""Asks XLA:CPU to compile programs in the least time: a test runs most of its programs once or twice.

`--xla_cpu_use_fusion_emitters=false` would save another quarter, but jaxlib 0.10.2 then reads wrong bytes of pools with
layers in a block, which `tests/paged/test_many_rows.py` finds, and later releases have no such flag.
"""

from __future__ import annotations

import os

CHEAPEST = "--xla_backend_optimization_level=0"


def enable() -> None:
    """Adds the flag to `XLA_FLAGS`, for this process and those that it starts; before JAX is first used."""
    if not is_enabled():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CHEAPEST}".strip()


def is_enabled() -> bool:
    """True if this process was asked to."""
    return CHEAPEST in os.environ.get("XLA_FLAGS", "").split()
