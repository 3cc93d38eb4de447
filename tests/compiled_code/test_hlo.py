"""Bytes are counted off HLO as the programs move them, and widths, atomics and spills off PTX."""

from __future__ import annotations

import pytest

from tests.compiled_code import hlo, ptx

SCATTER = """
HloModule jit_write

%fused_scatter (param_0: u8[1048576,128], param_1: u8[4,1,128], param_2: s32[4,1]) -> u8[1048576,128] {
  %param_0 = u8[1048576,128]{1,0} parameter(0)
  %param_2 = s32[4,1]{1,0} parameter(2)
  %param_1 = u8[4,1,128]{2,1,0} parameter(1)
  ROOT %scatter.1 = u8[1048576,128]{1,0} scatter(%param_0, %param_2, %param_1), update_window_dims={1,2}, to_apply=%r
}

ENTRY %main (pool: u8[134217728], values: u8[4,1,128], ids: s32[4,1]) -> u8[134217728] {
  %pool = u8[134217728]{0} parameter(0)
  %values = u8[4,1,128]{2,1,0} parameter(1)
  %ids = s32[4,1]{1,0} parameter(2)
  %rows = u8[1048576,128]{1,0} bitcast(%pool)
  %scattered = u8[1048576,128]{1,0} fusion(%rows, VALUES, %ids), kind=kInput, calls=%fused_scatter
  ROOT %out = u8[134217728]{0} bitcast(%scattered)
}
"""
IN_PLACE = SCATTER.replace("VALUES", "%values")
TWICE = SCATTER.replace("VALUES", "%joined").replace(
    "  %rows", "  %joined = u8[4,1,128]{2,1,0} concatenate(%values), dimensions={0}\n  %rows"
)
COPIED = SCATTER.replace("VALUES", "%values").replace("bitcast(%pool)", "copy(%pool)")
GATHER = """
%fused (param_0: u8[1024,128], param_1: s32[4,1]) -> u8[4,1,128] {
  %param_0 = u8[1024,128]{1,0} parameter(0)
  %param_1 = s32[4,1]{1,0} parameter(1)
  ROOT %gather.1 = u8[4,1,128]{2,1,0} gather(%param_0, %param_1), offset_dims={1,2}, slice_sizes={1,128}
}

ENTRY %main (pool: u8[1024,128], ids: s32[4,1]) -> u8[4,1,128] {
  %pool = u8[1024,128]{1,0} parameter(0)
  %ids = s32[4,1]{1,0} parameter(1)
  ROOT %found = u8[4,1,128]{2,1,0} fusion(%pool, %ids), kind=kLoop, calls=%fused
}
"""
KERNEL = """
ENTRY %main (starts: s32[8], pool: u32[4096,64]) -> u32[4096,64] {
  %starts = s32[8]{0} parameter(0)
  %pool = u32[4096,64]{1,0} parameter(1)
  ROOT %moved = u32[4096,64]{1,0} custom-call(%starts, %pool), custom_call_target="kernel",\
 output_to_operand_aliasing={{}: (1, {})}, metadata={op_name="jit(f)/NAME_runs_of_2048_bytes"}
}
"""


def total(text):
    return [(launch.read, launch.written) for launch in hlo.launches(text)]


def test_a_scatter_in_place_touches_what_it_writes():
    assert total(IN_PLACE) == [(512 + 16, 512)]
    assert hlo.whole_copies(IN_PLACE, 1000) == []


def test_an_array_that_is_made_before_it_is_moved_counts_twice():
    assert sum(map(sum, total(TWICE))) == sum(map(sum, total(IN_PLACE))) + 1024


def test_a_copy_of_the_pool_is_seen():
    assert total(COPIED)[0] == (134217728, 134217728)
    assert hlo.whole_copies(COPIED, 134217728) == ["copy u8[1048576,128]"]


def test_a_gather_reads_what_it_takes():
    assert total(GATHER) == [(512 + 16, 512)]


def test_a_kernel_says_how_much_it_moves():
    assert total(KERNEL.replace("NAME", "move")) == [(2048 + 32, 2048)]
    assert total(KERNEL.replace("NAME", "zero")) == [(32, 2048)]
    assert total(KERNEL.replace("NAME_runs_of_2048_bytes", "move_runs_of_2048_bytes_from_4096")) == [(4096 + 32, 2048)]


def test_control_flow_is_refused():
    text = GATHER.replace("fusion(%pool, %ids), kind=kLoop, calls=%fused", "while(%ids), condition=%c, body=%b")
    with pytest.raises(NotImplementedError, match="while"):
        hlo.launches(text)


PTX = """
.target sm_90
.visible .entry move(.param .u64 a) {
  ld.global.nc.b32 %r1, [%rd1];
  @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [%rd2];
  @%p1 st.global.v4.b32 [ %rd3 + 0 ], { %r2, %r3, %r4, %r5 };
}
.visible .entry bad(.param .u64 a) {
  ld.global.b8 %rs1, [%rd1];
  st.relaxed.sys.global.b32 [%rd3], %r2;
  atom.global.cas.b32 %r1, [%rd1], %r2, %r3;
}
.visible .entry bulk(.param .u64 a) {
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
  cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2;
}
"""


def test_accesses_of_each_kernel():
    move, bad, bulk = ptx.kernels(PTX)
    assert (move.loads, move.stores, move.atomics) == ((4, 16), (16,), ())
    assert (bad.loads, bad.stores, bad.atomics) == ((1,), (4,), ("atom.global.cas.b32",))
    assert (bulk.loads, bulk.stores) == ((ptx.BULK,), (ptx.BULK,))
