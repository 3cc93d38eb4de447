"""Asks XLA:CPU to compile whole loops to machine code.

XLA:CPU compiles a loop as one native function only if a trip touches less than a kilobyte; a larger one is interpreted,
step after step, at a tenth of a microsecond each. The compiled cache is a loop over operations with loops inside, each
trip a few hundred scalars: as native code it is several times faster. The limit is an option of the process, which XLA
reads once, when JAX is first used: it lies in the map `xla_backend_extra_options`, and the `compiler_options` of one
compilation take numbers and strings only. A program that is compiled without it therefore warns once.

XLA's `xla_cpu_copy_insertion_use_region_analysis` would save another quarter, but leaves out copies that are needed:
with it, jaxlib 0.10.2 hands out wrong blocks, which `tests/slow/optimized/replay/test_compiled.py` finds: it must stay
off.
"""

from __future__ import annotations

import functools
import os
import warnings

OPTION = "xla_cpu_small_while_loop_byte_threshold"
LIMIT = 1 << 30
"""Bytes that a trip of a native loop may touch."""

FLAG = f"--xla_backend_extra_options={OPTION}={LIMIT}"


class InterpretedLoopsWarning(UserWarning):
    """The compiled cache runs about ten times slower than it could, because XLA:CPU was not asked for native loops."""


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


def warn_if_interpreted() -> None:
    """Warns, once in a process, where XLA:CPU interprets the loop that is about to be compiled.

    Emits `InterpretedLoopsWarning`, with the remedy. Other backends have no such limit and give no warning.
    """
    if not _in_effect():
        _warn()


@functools.cache
def _in_effect() -> bool:
    """True if this process compiles large loops natively. A small program shows it: `XLA_FLAGS` may be set too late."""
    import jax
    import jax.numpy as jnp

    if jax.default_backend() != "cpu":
        return True

    def reverse(line: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + c[1][0], c[1] + c[1][::-1]), (0, line))[1]

    line = jax.ShapeDtypeStruct((1024,), jnp.int32)
    compiled = jax.jit(reverse).lower(line).compile().as_text() or ""
    return "xla_cpu_small_call" in compiled


@functools.cache
def _warn() -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_extra_options" in flags and OPTION not in flags:
        remedy = f"add {OPTION}={LIMIT} to the xla_backend_extra_options in XLA_FLAGS"
    else:
        remedy = f"call hkv.machine.native_loops.enable() before JAX is first used, or set XLA_FLAGS to {FLAG}"
    text = f"XLA:CPU interprets the loops of the compiled cache in this process, about ten times slower: {remedy}"
    warnings.warn(text, InterpretedLoopsWarning, stacklevel=3)
