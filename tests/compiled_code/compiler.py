"""Programs compiled for an NVIDIA GPU that is described and not there, with the PTX of every kernel in them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import tempfile
import zlib
from typing import Any

import jax
from jax.experimental import topologies

from tests.compiled_code import ptx
from tests.pallas_kernels import programs

DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: {cores} fpus_per_core: {fpus}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 3 patch: 0 }}
device_description_str: "{name}"
"""
HOPPER = DESCRIPTION.format(
    cores=132, fpus=128, shared=233472, optin=232448, bandwidth=4800000000000, cache=52428800, clock=1.98,
    memory=150000000000, major=9, name="NVIDIA H200",
)  # fmt: skip
AMPERE = DESCRIPTION.format(
    cores=108, fpus=64, shared=167936, optin=166912, bandwidth=2039000000000, cache=41943040, clock=1.41,
    memory=85000000000, major=8, name="NVIDIA A100",
)  # fmt: skip
GPUS = {"sm_90": HOPPER, "sm_80": AMPERE}

OPTIMIZED = {"xla_backend_optimization_level": 3}
"""XLA's default, whatever this process asks for elsewhere: the code is what users get."""

DUMPS = tempfile.TemporaryDirectory(prefix="hkv-mosaic-")
"""Folder of the process in which Mosaic GPU leaves its PTX and the report of `ptxas`."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One program: its optimised HLO, as text, and the entries of all its PTX."""

    hlo: str
    kernels: tuple[ptx.Kernel, ...]


@functools.cache
def sharding(gpu: str) -> Any:
    """A device to compile for: the description of `gpu`, whatever is there."""
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    os.environ["MOSAIC_GPU_DUMP_TO"] = DUMPS.name
    described = {"target_config": GPUS[gpu], "topology": "1x1x1"}
    found = topologies.get_topology_desc(platform="cuda", topology_name=f"cuda-{gpu}", **described)
    return jax.sharding.SingleDeviceSharding(found.devices[0])


def compile_for(gpu: str, program: programs.Program) -> Compiled:
    """A program for `sm_90` or `sm_80`, in PTX as far as kernels reach."""
    lowered = programs.lowered(program, sharding(gpu))
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        hlo = lowered.compile(compiler_options={**OPTIMIZED, **dump}).as_text()
        found = [kernel for path in sorted(pathlib.Path(folder).glob("*.ptx")) for kernel in _kernels(path.read_text())]
    return Compiled(hlo, (*found, *_mosaic(hlo), *_triton(hlo)))


@functools.cache
def ptxas() -> pathlib.Path:
    """The assembler that comes with Triton, which knows every version of PTX that it and XLA write."""
    spec = importlib.util.find_spec("triton.backends.nvidia")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return pathlib.Path(next(iter(spec.submodule_search_locations)), "bin", "ptxas-blackwell")


@functools.cache
def _kernels(text: str) -> tuple[ptx.Kernel, ...]:
    found = tuple(ptx.kernels(text))
    spilled = ptx.spilled(text, ptxas()) if found else 0
    return tuple(dataclasses.replace(kernel, spilled=spilled) for kernel in found)


_mosaic_kernels: dict[str, tuple[ptx.Kernel, ...]] = {}
"""By hash: Mosaic compiles equal kernels once in a process, and leaves their PTX that one time."""


def _mosaic(hlo: str) -> tuple[ptx.Kernel, ...]:
    hashes = sorted(set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', hlo)))
    if new := [found for found in hashes if found not in _mosaic_kernels]:
        texts = sorted(pathlib.Path(DUMPS.name).glob("*.ptx"))
        made = tuple(kernel for path in texts for kernel in ptx.kernels(path.read_text()))
        said = "".join(path.read_text() for path in pathlib.Path(DUMPS.name).glob("*.ptxas"))
        spills = sum(int(a) + int(b) for a, b in ptx.SPILLS.findall(said))
        assert made, "Mosaic GPU left no PTX"
        for path in pathlib.Path(DUMPS.name).iterdir():
            path.unlink()
        for found in new:
            _mosaic_kernels[found] = tuple(dataclasses.replace(kernel, spilled=spills) for kernel in made)
    return tuple({kernel for found in hashes for kernel in _mosaic_kernels[found]})


def _triton(hlo: str) -> tuple[ptx.Kernel, ...]:
    """The PTX that jax-triton puts, compressed, into each of its calls."""
    calls = re.findall(r'custom_call_target="triton_kernel_call".*?backend_config="((?:[^"\\]|\\.)*)"', hlo)
    found: list[ptx.Kernel] = []
    for call in sorted(set(calls)):
        data = zlib.decompress(call.encode("latin-1").decode("unicode_escape").encode("latin-1"))
        text = re.search(rb"\.version[\x09-\x7e]*", data)
        assert text is not None
        found += _kernels(text[0][: text[0].rindex(b"}") + 1].decode())
    return tuple(found)
