"""The `triton` implementation: named when its extra is missing; its kernels compiled and interpreted without a GPU."""

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
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernel", ["gather_kernel", "scatter_kernel", "scatter_kernel_of_two_pointers"])
@pytest.mark.parametrize(("row", "word"), [(132, "u8"), (656, "u8"), (576, "u16"), (1024, "u32")])
def test_kernels_compile_for_hopper(kernel, row, word):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels import triton_source
    from pallas_kernels.triton_tiles import NUM_WARPS, tiles_of

    function = getattr(triton_source, kernel)
    tiles = tiles_of(row, {"u8": 1, "u16": 2, "u32": 4}[word])
    constants = {"last": 99, "row": row, "length": row, "width": tiles.width}
    pointers = [name for name in function.arg_names if name not in constants]
    signature = {name: "*i32" if name == "starts" else f"*{word}" for name in pointers}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(pointers))}
    made = triton.compile(
        ASTSource(function, signature, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": NUM_WARPS},
    )
    assert ".target sm_90" in made.asm["ptx"]
    assert len(made.asm["cubin"]) > 0
    if row % 16 == 0 and tiles.width == row:
        assert "ld.global.v" in made.asm["ptx"], "words are moved several at a time"


@pytest.mark.triton
@pytest.mark.torch
def test_values_under_tritons_interpreter():
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "tests.pallas_kernels.triton_values"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "12 kernels agree" in ran.stdout
