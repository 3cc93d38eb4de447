"""Programs compiled for sm_90 by JAX's CUDA plugin, with or without a GPU: in place, without copies."""

from __future__ import annotations

import math
import os
import re

import jax
import pytest
from jax.experimental import topologies

from tests.pallas_kernels import cases, programs

pytestmark = [pytest.mark.cuda_plugin, pytest.mark.filterwarnings(cases.DEPRECATED)]

JAX_TRITON = pytest.param("triton", marks=[pytest.mark.triton, pytest.mark.jax_triton])
KERNELS = (*programs.KERNELS, "xla", JAX_TRITON)

HOPPER = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 3 patch: 0 }
device_description_str: "NVIDIA H200"
"""


@pytest.fixture(scope="module")
def sharding():
    """A GPU to compile for: one that is there, or the description of one."""
    if jax.default_backend() == "gpu":
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    description = {"target_config": HOPPER, "topology": "1x1x1"}
    found = topologies.get_topology_desc(platform="cuda", topology_name="cuda", **description)
    return jax.sharding.SingleDeviceSharding(found.devices[0])


def check_in_place(text, pool_bytes, what):
    assert "input_output_alias" in text, what
    sizes = {"u8": 1, "s8": 1, "u16": 2, "bf16": 2, "f16": 2, "u32": 4, "s32": 4, "f32": 4}
    for dtype, shape in re.findall(r"= (\w+)\[([\d,]*)\]\S* (?:copy|copy-start)\(", text):
        nbytes = sizes.get(dtype, 1) * math.prod(int(n) for n in shape.split(",") if n)
        assert nbytes < pool_bytes, f"{dtype}[{shape}] is copied by {what}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", programs.LAYOUTS.values(), ids=programs.LAYOUTS)
def test_paged_operations(sharding, layout, kernel):
    for operation in programs.OPERATIONS:
        program = programs.paged_program(layout, kernel, operation)
        check_in_place(programs.lowered(program, sharding).compile().as_text(), program.pool_bytes, operation)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("direction", ["pack", "unpack"])
@pytest.mark.parametrize(("geometries", "launches", "writes"), programs.GROUPS.values(), ids=programs.GROUPS)
def test_chunk_transfers(sharding, geometries, launches, writes, direction, kernel):
    program = programs.chunk_program(geometries, kernel, direction)
    text = programs.lowered(program, sharding).compile().as_text()
    check_in_place(text, program.pool_bytes, direction)
    assert kernel in ("xla", "triton") or len(re.findall(r" custom-call\(", text)) == launches + (
        writes if direction == "pack" else 0
    )


@pytest.mark.parametrize("kernel", programs.KERNELS)
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_all_layers_of_a_large_model(sharding, direction, kernel):
    program = programs.chunk_program([programs.geometry(3, 78, 64, 1, 576, "bfloat16")], kernel, direction)
    check_in_place(programs.lowered(program, sharding).compile().as_text(), program.pool_bytes, direction)


@pytest.mark.parametrize("operation", ["write", "scatter", "copy_blocks", "zero_blocks"])
def test_xla_stores_bytes_without_compare_and_swap(sharding, operation, tmp_path):
    """A scatter that may meet an index twice is one atomic exchange a byte; these promise that they do not."""
    program = programs.paged_program(programs.LAYOUTS["656 bytes"], "xla", operation)
    dump = {"xla_dump_to": str(tmp_path), "xla_gpu_dump_llvmir": True, "xla_dump_emitter_re": ".*"}
    programs.lowered(program, sharding).compile(compiler_options=dump)
    code = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    assert "st.global.b8" in code
    assert not re.findall(r"atom\S*\.cas", code)


def test_an_undonated_pool_is_copied(sharding):
    """The search for copies sees one where there has to be one."""
    program = programs.paged_program(programs.LAYOUTS["LBNHC"], "pallas_triton", "write")._replace(donated=())
    text = programs.lowered(program, sharding).compile().as_text()
    with pytest.raises(AssertionError):
        check_in_place("input_output_alias" + text, program.pool_bytes, "write")
