"""The two indices of block rows: RTP-LLM's vectors, the twin, and that nothing puts them out of step."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.block_tables import rows as jitted
from hkv.block_tables.rows import BlockRows, init_rows
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.errors import OperationError
from hkv.state.state import State
from hkv.state.status import Status
from hkv.state.workspace import ARRAYS, COUNTERS, OUTPUTS, Sizes, Workspace
from reference.state import rows as plain
from tests.cache import build

ROWS, WIDTH, SPAN, BATCH = 3, 6, 4, 4
INT32_MAX = 2**31 - 1
N = -1

REFUSALS = {
    "row": Status.NO_SUCH_ROW,
    "count": Status.BAD_COUNT,
    "position": Status.NO_SUCH_POSITION,
    "length": Status.BAD_LENGTH,
    "block": Status.BAD_BLOCK,
}
"""The code of each argument that the twin refuses."""


def row_of(rows: BlockRows, row: int = 0) -> tuple[list[int], list[int]]:
    blocks, kernel_blocks, lengths, ratio = map(np.asarray, (rows.blocks, rows.kernel_blocks, rows.lengths, rows.ratio))
    return blocks[row, : lengths[row]].tolist(), kernel_blocks[row, : lengths[row] * ratio].tolist()


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def batch(*values: int) -> np.ndarray:
    """Values and padding: of one length, as all rows are of one size, so that a few programs serve all tests."""
    return i32(*values, *[0] * (BATCH - len(values)))


def empty(ratio: int, null: int = N) -> BlockRows:
    return init_rows(ROWS, WIDTH, ratio=ratio, null=null, span=max(ratio, SPAN))


def start(blocks: list[int], ratio: int, null: int = N) -> BlockRows:
    rows, status = jitted.assign(empty(ratio, null), np.int32(0), batch(*blocks), np.int32(len(blocks)))
    assert status == Status.OK
    return rows


def test_swap_exchanges_two_slots_and_their_kernel_blocks():
    rows, status = jitted.swap(start([1, 2, 3], 2), np.int32(0), np.int32(0), np.int32(2))
    assert (row_of(rows), status) == (([3, 2, 1], [6, 7, 4, 5, 2, 3]), Status.OK)


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"num_rows": 0, "width": 1}, "num_rows"),
        ({"num_rows": 1, "width": -1}, "width"),
        ({"num_rows": 1, "width": 1, "ratio": 0}, "ratio"),
        ({"num_rows": 1, "width": 1, "ratio": 4, "span": 2}, "ratio"),
        ({"num_rows": 1, "width": 1, "null": 1}, "null"),
        ({"num_rows": 1, "width": 2**30, "ratio": 2}, "width"),
    ],
)
def test_impossible_rows_are_refused(fields, argument):
    with pytest.raises(OperationError) as error:
        init_rows(**fields)
    assert error.value.argument == argument


def mostly(usual, unusual):
    """Draws nine times in ten from what is in order, so that operations have something to work on."""
    return st.integers(0, 9).flatmap(lambda die: unusual if die == 9 else usual)


EDGES = [-1, -2, INT32_MAX, INT32_MAX // 2, INT32_MAX // 2 + 1, INT32_MAX // 3, INT32_MAX // 4, -INT32_MAX - 1]
ids = mostly(st.integers(0, 40), st.sampled_from(EDGES))
some_rows = mostly(st.integers(0, ROWS - 1), st.sampled_from([-1, ROWS, INT32_MAX]))
some_positions = mostly(st.integers(0, 2), st.sampled_from([-1, WIDTH - 1, WIDTH, INT32_MAX, -INT32_MAX - 1]))
some_lengths = mostly(st.integers(0, WIDTH), st.sampled_from([-1, WIDTH + 1, INT32_MAX]))
batches = st.lists(ids, min_size=BATCH, max_size=BATCH)
counts = mostly(st.integers(0, BATCH), st.sampled_from([-1, BATCH + 1, INT32_MAX, -INT32_MAX - 1]))
ARGUMENTS = {
    "append": (some_rows, batches, counts),
    "assign": (some_rows, batches, counts),
    "append_all": (st.lists(batches, min_size=ROWS, max_size=ROWS), st.lists(counts, min_size=ROWS, max_size=ROWS)),
    "remove": (some_rows, st.lists(some_positions, min_size=BATCH, max_size=BATCH), counts),
    "swap": (some_rows, some_positions, some_positions),
    "set_at": (some_rows, some_positions, ids),
    "resize": (some_rows, some_lengths, ids),
    "pop": (some_rows,),
    "move": (some_rows, some_rows),
}
operations = st.sampled_from(sorted(ARGUMENTS)).flatmap(lambda name: st.tuples(st.just(name), *ARGUMENTS[name]))


def expect(twin, name, arguments):
    """Expected answer, by the twin: a status for each thing asked, and the popped block."""
    try:
        answer = getattr(twin, name)(*arguments)
    except OperationError as error:
        return REFUSALS[error.argument], None
    if name == "append_all":
        return [Status.OK if error is None else REFUSALS[error.argument] for error in answer], None
    return Status.OK, answer


def in_step(blocks_of: np.ndarray, kernel_of: np.ndarray, lengths: np.ndarray, ratio: int) -> bool:
    """Kernel rows are the blocks' expansion, slot by slot, and both are zero behind the length."""
    for row, length in enumerate(lengths.tolist()):
        blocks, kernel = blocks_of[row].tolist(), kernel_of[row].tolist()
        wanted = [k for b in blocks[:length] for k in ([b] * ratio if b < 0 else range(b * ratio, b * ratio + ratio))]
        if kernel[: length * ratio] != wanted or any(kernel[length * ratio :]) or any(blocks[length:]):
            return False
    return True


@given(st.integers(1, SPAN), st.sampled_from([0, -1]), st.lists(operations, min_size=1, max_size=12))
@settings(max_examples=200)
def test_twin_and_jitted_rows_agree_and_stay_in_step(ratio, null, steps):
    rows = init_rows(ROWS, WIDTH, ratio=ratio, null=null, span=SPAN)
    twin = plain.BlockRows(ROWS, WIDTH, ratio=ratio, null=null)
    for name, *arguments in steps:
        status, block = expect(twin, name, arguments)
        rows, *answer = getattr(jitted, name)(rows, *(np.array(argument, np.int32) for argument in arguments))
        *answer, mine, mine_kernel, lengths = map(np.asarray, (*answer, rows.blocks, rows.kernel_blocks, rows.lengths))
        assert answer[-1].tolist() == status
        if name == "pop":
            assert answer[0] == (null if block is None else block)
        blocks, kernel_blocks = twin.tables(SPAN)
        np.testing.assert_array_equal(mine, blocks)
        np.testing.assert_array_equal(mine_kernel, kernel_blocks)
        assert in_step(mine, mine_kernel, lengths, ratio)


def test_rows_of_several_groups_at_once():
    ratios, nulls = [1, 2, 4], [0, -1, -1]
    groups = [init_rows(ROWS, WIDTH, ratio=r, null=n, span=SPAN) for r, n in zip(ratios, nulls, strict=True)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *groups)
    blocks = np.arange(1, 4, dtype=np.int32)[:, None] + i32(0, 1, 2, 3)
    append = jax.vmap(jitted.append, in_axes=(0, None, 0, None))
    grown, status = append(stacked, np.int32(1), blocks, np.int32(3))
    assert status.tolist() == [Status.OK] * 3
    for group, (ratio, null) in enumerate(zip(ratios, nulls, strict=True)):
        twin = plain.BlockRows(ROWS, WIDTH, ratio=ratio, null=null)
        twin.append(1, blocks[group].tolist(), 3)
        np.testing.assert_array_equal(grown.blocks[group], twin.tables(SPAN)[0])
        np.testing.assert_array_equal(grown.kernel_blocks[group], twin.tables(SPAN)[1])


def test_ratio_and_null_are_data_and_cost_no_compilation():
    def serve(ratio: int, null: int) -> None:
        rows, _ = jitted.append(empty(ratio, null), np.int32(0), batch(1, 2, 3), np.int32(3))
        rows, _ = jitted.set_at(rows, np.int32(0), np.int32(1), np.int32(null))
        rows, _, _ = jitted.pop(rows, np.int32(0))

    serve(1, 0)
    programs: Any = (jitted.append, jitted.set_at, jitted.pop)
    before = [program._cache_size() for program in programs]
    for ratio in (1, 2, 3):
        for null in (0, -1):
            serve(ratio, null)
    assert [program._cache_size() for program in programs] == before


def test_an_operation_takes_its_rows_over():
    rows = empty(ratio=2)
    grown, _ = jitted.append(rows, np.int32(0), batch(1, 2), np.int32(2))
    assert all(leaf.is_deleted() for leaf in (rows.blocks, rows.kernel_blocks, rows.lengths))
    assert not grown.blocks.is_deleted()


# The example of a loop in docs/cache.md runs.


DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_example_of_a_loop_counts_registered_blocks() -> None:
    found = re.findall(r"```python\n(.*?)```", (DOCS / "cache.md").read_text(), re.DOTALL)
    code = [block for block in found if "def count_cached" in block]
    assert len(code) == 1
    scope: dict[str, Any] = {"__name__": "example"}
    exec(code[0], scope)
    parameters, state = build.start()
    state, _ = build.run(parameters, state, build.prompt(Batch(), 0, range(7)).add(Code.STEP))
    want = np.count_nonzero(np.asarray(state.keys)[np.asarray(state.rows)[0, 1, :7], 0])

    @jax.jit
    def counted(state: State) -> jax.Array:
        arrays = {name: getattr(state, name).reshape(-1) for name in ARRAYS}
        outside = {name: jnp.int32(0) for name in (*OUTPUTS, *COUNTERS, "lane", "num_ids", "num_events", "num_copies")}
        work = Workspace(Sizes(build.BUCKETS, 1, 1, 1, 0, 0), **arrays, **outside)
        return scope["count_cached"](work, work.row(0, 1), 7)[1]

    assert int(counted(state)) == want > 0
