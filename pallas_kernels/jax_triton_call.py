"""Calling a Triton kernel through jax-triton: what differs between its releases 0.3 and 0.4."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import Any

import jax

HOPPER = 90
"""Compute capability that kernels are compiled for where there is no GPU to ask."""


def load() -> Any:
    """The `jax_triton` module; ImportError if it is not installed, or is 0.3 and JAX has no GPU support."""
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        return importlib.import_module("jax_triton")
    finally:
        # jax-triton 0.3 empties the variable on import, even when it fails, and Triton then finds no cache folder.
        if kept is not None:
            os.environ["TRITON_CACHE_DIR"] = kept
        elif not os.environ.get("TRITON_CACHE_DIR", "unset"):
            del os.environ["TRITON_CACHE_DIR"]


def two_pointers() -> bool:
    """True if an aliased buffer arrives at the kernel both as input and as output: so until jax-triton 0.4."""
    return tuple(int(part) for part in importlib.metadata.version("jax-triton").split(".")[:2]) < (0, 4)


def call(kernel: Any, *operands: Any, out: jax.ShapeDtypeStruct, **options: Any) -> Any:
    """`jax_triton.triton_call` of a `triton.jit` function under the names of the installed release.

    `out` is the result's shape and dtype; `options` are grid, aliases and the kernel's constants.
    """
    name = "out_shape" if two_pointers() else "out_type"
    if jax.default_backend() != "gpu":
        options["compute_capability"] = HOPPER
    return load().triton_call(*operands, kernel=kernel, **{name: out}, **options)
