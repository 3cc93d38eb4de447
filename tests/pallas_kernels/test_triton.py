"""The `triton` implementation: named when its extra is missing, interpreted here, compiled by `compiled_code`."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from hkv.errors import MissingExtraError
from hkv.paged.implementations import choose

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


@pytest.mark.skipif(has("jax_triton") and jax.default_backend() == "gpu", reason="jax-triton works here")
def test_a_missing_extra_is_named():
    if has("jax_triton", "jax_plugins"):
        pytest.skip("jax-triton is installed and JAX has GPU support, so nothing is missing")
    before = os.environ.get("TRITON_CACHE_DIR")
    with pytest.raises(MissingExtraError, match="implementation='triton'") as found:
        choose("triton")
    assert found.value.extra == "gpu"
    assert os.environ.get("TRITON_CACHE_DIR") == before


@pytest.mark.triton
@pytest.mark.torch
def test_values_under_tritons_interpreter():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "tests.pallas_kernels.triton_values"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "40 kernels agree" in ran.stdout
