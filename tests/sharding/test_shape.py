"""Ranks that hold heads and tokens, against dealing these out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.errors import ConfigError, LayoutError
from hkv.layout.block_layout import Layout
from hkv.mesh.parallel_shape import ParallelShape
from hkv.spec import FullAttention, Mamba
from reference.sharding import dealt_states, head_holders


@given(st.integers(1, 12), st.integers(1, 16))
def test_heads(heads: int, tensor: int) -> None:
    if heads % tensor and tensor % heads:
        with pytest.raises(ConfigError, match="tensor = "):
            ParallelShape(heads=heads, tensor=tensor)
        return
    shape = ParallelShape(heads=heads, tensor=tensor)
    holders = head_holders(heads, tensor)
    assert [list(shape.tensor_ranks_of(head)) for head in range(heads)] == holders
    for rank in range(tensor):
        assert list(shape.heads_of(rank)) == [head for head, ranks in enumerate(holders) if rank in ranks]


def test_heads_and_ranks_as_written_down() -> None:
    """As vLLM splits them: consecutive ranks share a head."""
    assert [list(ParallelShape(heads=8, tensor=4).heads_of(rank)) for rank in range(4)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert [list(ParallelShape(heads=2, tensor=8).heads_of(rank)) for rank in range(8)] == [[0]] * 4 + [[1]] * 4


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_states(turns: int, ranks: int, together: int) -> None:
    shape = ParallelShape(heads=1, context=ranks, interleave=together)
    states = turns * together
    split = [shape.split(state, together) for state in range(states * ranks)]
    assert split == dealt_states(states, ranks, together)
    assert sorted(split) == [(rank, state) for rank in range(ranks) for state in range(states)]


def layout(**changes: object) -> Layout:
    spec = FullAttention(**{"block_size": 8, "num_kv_heads": 1, "head_size": 4, **changes})  # type: ignore[arg-type]
    return Layout.of_spec(spec, "LBNHC", num_blocks=2)


@pytest.mark.parametrize(
    ("changes", "interleave", "states"), [({}, 4, 4), ({"tokens_per_state": 2}, 4, 2), ({"tokens_per_state": 4}, 4, 1)]
)
def test_states_that_stay_together(changes: dict[str, object], interleave: int, states: int) -> None:
    assert ParallelShape(heads=1, context=2, interleave=interleave).interleave_states(layout(**changes)) == states


@pytest.mark.parametrize(("changes", "interleave"), [({}, 3), ({}, 16), ({"tokens_per_state": 4}, 2)])
def test_an_interleave_that_cuts_a_block_or_a_state(changes: dict[str, object], interleave: int) -> None:
    shape = ParallelShape(heads=1, context=2, interleave=interleave)
    with pytest.raises(ConfigError, match=f"interleave = {interleave}: expected whole states"):
        shape.check(layout(**changes))


def test_a_snapshot_is_not_split() -> None:
    state = Layout.of_spec(Mamba(block_size=8, shapes=((4,),), dtypes=("float32",)), "LBNHC", num_blocks=2)
    ParallelShape(heads=2, tensor=2, context=2, interleave=None).check(state)
    with pytest.raises(ConfigError, match="interleave = 1: expected None"):
        ParallelShape(heads=2, tensor=2, context=2).check(state)


@pytest.mark.parametrize("field", ["heads", "data", "tensor", "context", "interleave"])
def test_counts_are_positive(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} = 0: expected a positive integer"):
        ParallelShape(**{"heads": 1, field: 0})


def test_ranks_that_are_not_there() -> None:
    shape = ParallelShape(heads=4, tensor=2, context=2)
    for call in (lambda: shape.heads_of(2), lambda: shape.tensor_ranks_of(-1), lambda: shape.context_ranks_of(2)):
        with pytest.raises(ConfigError, match="expected an integer from 0"):
            call()
    with pytest.raises(LayoutError, match="key of 1 heads"):
        shape.check(layout())
