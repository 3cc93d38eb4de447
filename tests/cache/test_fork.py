"""Forking: the compiled form beside its twin over the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.operations import RESULT_FRONT, Batch, Code, Column
from hkv.oracle.configuration import to_header
from hkv.oracle.engines.numpy import NumpyEngine
from hkv.oracle.oplog import AllocateOp
from hkv.spec import ChunkedLocal, FullAttention, Mamba, OpaqueState, SlidingWindow
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Counter, Row
from hkv.state.status import Status
from reference.dialects.vllm.fork import fork
from tests.cache.build import config, prompt, run, start

SHAPES = [
    (FullAttention(block_size=8), SlidingWindow(block_size=4, window=9), Mamba(block_size=8)),
    (FullAttention(block_size=4),),
    (SlidingWindow(block_size=4, window=1), FullAttention(block_size=4)),
    (ChunkedLocal(block_size=4, chunk=8), FullAttention(block_size=4), OpaqueState(block_size=4)),
    (FullAttention(block_size=8), Mamba(block_size=8, num_speculative_blocks=1)),
]


def both(specs, tokens: int, num_blocks: int, processed: int):
    """Copies per group or None, free blocks and rows, from either form."""
    settings = config(*specs, num_blocks=num_blocks)
    engine = NumpyEngine(to_header(settings, "core"))
    size = settings.hash_block_size
    engine.request_keyed("a", tokens, range(100))
    no = {"hit": 0, "lookahead": 0, "external": 0, "delay": False, "must_fit": False, "reserved": 0, "in_flight": 0}
    engine.allocate(AllocateOp(id="a", new=tokens, **no))
    engine.advance("a", tokens)
    manager = engine.manager
    for kind in manager.cache.kinds:
        kind.retire("a", processed)
    want = fork(manager, "a", "b")
    batch = prompt(Batch(), 0, range(tokens // size), tokens=tokens).add(Code.RETIRE, 0, tokens=processed)
    parameters, state = start(settings)
    state, results = run(parameters, state, batch.add(Code.FORK, 0, tokens=1))
    row = results.table[4]
    ids = iter(results.ids[row[Column.IDS] :].tolist())
    got = None
    if row[Column.STATUS] == Status.OK:
        ends = row[RESULT_FRONT:].reshape(-1, 2)[: len(specs)]
        got = [[(next(ids), next(ids)) for _ in range(start, end)] for start, end in ends]
    held, records = np.asarray(state.rows), np.asarray(state.requests)[:, REQUEST_WORDS:]
    for slot, name in enumerate("ab"):
        for group, row in enumerate(manager.rows(name) if name in manager.requests else ()):
            length, first = records[slot].reshape(-1, GROUP_WORDS)[group, [Row.LENGTH, Row.FIRST]]
            assert [0] * first + held[slot, group, first:length].tolist() == row
    assert int(state.counters[Counter.FREE]) == manager.num_free()
    return want, got


@settings(max_examples=60)
@given(st.sampled_from(SHAPES), st.integers(1, 60), st.integers(20, 60), st.integers(0, 70))
def test_both_forms_agree(specs, tokens: int, num_blocks: int, behind: int) -> None:
    needed = sum(-(-tokens // spec.block_size) for spec in specs)
    want, got = both(specs, tokens, max(num_blocks, needed + 2), max(0, tokens - behind))
    assert want == got


def test_copies_are_reported() -> None:
    want, got = both(SHAPES[0], 21, 40, 21)
    assert want == got
    assert [len(copies) for copies in got] == [1, 1, 1]


def test_full_blocks_need_no_copy() -> None:
    assert both(SHAPES[0], 24, 40, 24)[1] == [[], [], []]


@pytest.mark.parametrize("num_blocks", [10, 11])
def test_it_is_refused_whole_without_room(num_blocks: int) -> None:
    want, got = both(SHAPES[1], 33, num_blocks, 33)
    assert want == got
    assert (got is None) == (num_blocks == 10)


def test_it_is_refused_when_a_block_is_missing() -> None:
    want, got = both(SHAPES[0], 40, 40, 90)
    assert want is None
    assert got is None
