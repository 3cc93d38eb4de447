"""Asks XLA:CPU to compile whole loops to machine code.

XLA:CPU compiles a loop as one native function only if a trip touches less than a kilobyte; a larger one is interpreted,
step after step, at a tenth of a microsecond each. The compiled cache is a loop over operations with loops inside, each
trip a few hundred scalars: as native code it is several times faster. The limit is an option of the process, which XLA
reads once, when JAX is first used.

XLA's `xla_cpu_copy_insertion_use_region_analysis` would save another quarter, but leaves out copies that are needed:
with it, jaxlib 0.10.2 hands out wrong blocks, which `tests/replay/test_compiled.py` finds. It must stay off.
"""

from __future__ import annotations

import os

OPTION = "xla_cpu_small_while_loop_byte_threshold"
LIMIT = 1 << 30
"""Bytes that a trip of a native loop may touch."""

FLAG = f"--xla_backend_extra_options={OPTION}={LIMIT}"


def enable() -> bool:
    """Adds the option to the environment variable `XLA_FLAGS`, for programs that belong to HKV; libraries should not.

    To be called before JAX is first used. Nothing is changed where `XLA_FLAGS` sets backend options already.

    Returns:
      Whether the variable asks for native loops now.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()
    return OPTION in os.environ["XLA_FLAGS"]
