"""A step without compilation, as a debugger wants it: in less than seconds once JAX has compiled each operation."""

from __future__ import annotations

import time

import jax
import numpy as np

import hkv
from tests.slow.step.test_citizen import arguments, made


def test_steps_run_without_compilation():
    """No loop is over tokens or rows: what is left is some two thousand operations."""
    calls = arguments()
    compiled = hkv.step(hkv.arrive(made(), *calls["arrive"])[0], *calls["step"])
    with jax.disable_jit():
        seconds = []
        for _ in range(2):
            cache, _ = hkv.arrive(made(), *calls["arrive"])
            begun = time.process_time()
            found = hkv.step(cache, *calls["step"])
            seconds.append(time.process_time() - begun)
    jax.tree.map(np.testing.assert_array_equal, found, compiled)
    assert seconds[1] < 4
