"""Equal keys mean equal prefixes, whatever the block size, and nothing else does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TraceRequest


def mooncake(length, output, ids, per_id):
    return TraceRequest(
        line=1, timestamp=0, input_length=length, output_length=output, hash_ids=list(ids), tokens_per_id=per_id
    )


def token_list(tokens, output_tokens=None, output_length=0):
    length = output_length if output_tokens is None else len(output_tokens)
    return TraceRequest(
        line=1, timestamp=0, input_length=len(tokens), output_length=length, tokens=tokens,
        output_tokens=output_tokens, tokens_per_id=1,
    )  # fmt: skip


def keys_of(block, *requests, most=10_000):
    found = InternedTrace(requests).keys(block, most)
    assert found.keys.dtype == np.int32
    return [found.of(index).tolist() for index in range(len(requests))]


def test_ids_are_divided_into_blocks_and_output_gets_keys_of_its_own():
    requests = [mooncake(14, 6, [70, 71], 8), mooncake(16, 0, [70, 71], 8), mooncake(9, 3, [70, 90], 8)]
    # Key 3 ends where id 71 ends, beyond the first prompt.
    assert keys_of(4, *requests) == [[0, 1, 2, 4, 5], [0, 1, 2, 3], [0, 1, 8]]


def test_tokens_beyond_the_last_id_have_no_name():
    assert keys_of(4, mooncake(12, 0, [1], 8), mooncake(12, 0, [1], 8)) == [[0, 1, 2], [0, 1, 3]]


def test_a_second_turn_finds_the_answer_of_the_first():
    turns = (token_list([1, 2, 3], [4, 5]), token_list([1, 2, 3, 4, 5, 6]), token_list([1, 2, 3], output_length=3))
    assert keys_of(2, *turns) == [[0, 1], [0, 1, 2], [0, 3, 4]]
    assert keys_of(2, turns[0], mooncake(4, 0, [7, 8], 2), turns[1]) == [[0, 1], [2, 3], [0, 1, 4]]


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=14), st.integers(0, 9), st.integers(0, 2)),
        min_size=1,
        max_size=8,
    ),
    block=st.integers(1, 12),
    per_id=st.integers(1, 8),
    most=st.sampled_from([8, 15, 100]),
    told=st.booleans(),
)
def test_equal_keys_are_equal_prefixes(requests, block, per_id, most, told):
    """Tokens are drawn; ids are made of them as a trace's would be, the last ones perhaps left out, unless tokens are
    `told`; keys must tell apart what the tokens do, and be dense, in the order in which prefixes are met."""
    interned: dict[tuple, int] = {}
    trace, known = [], []
    for tokens, output, left_out in requests:
        tokens = [*tokens, 0]
        ends = range(per_id, len(tokens) + per_id, per_id)[: None if told or not left_out else -left_out]
        ids = [interned.setdefault(tuple(tokens[:end]), len(interned)) for end in ends]
        trace.append(token_list(tokens, None, output) if told else mooncake(len(tokens), output, ids, per_id))
        known.append((tokens, tokens) if told else (tokens[: len(ids) * per_id], ids))
    prefix_of_key: dict[int, tuple] = {}
    key_of_name: dict[tuple, int] = {}
    found = keys_of(block, *trace, most=most)
    for number, ((tokens, output, _), (named, ids), made) in enumerate(zip(requests, known, found, strict=True)):
        length = len(tokens) + 1 + output
        assert len(made) == (length // block if length <= most else 0)
        for index, key in enumerate(made):
            end = (index + 1) * block
            prefix = tuple(named[:end]) if end <= len(named) else ("generated", number, index)
            assert prefix_of_key.setdefault(key, prefix) == prefix
            name = prefix if told or end > len(named) else (ids[(end - 1) // per_id], end)
            assert key_of_name.setdefault(name, key) == key
    if told:
        assert list(prefix_of_key) == list(range(len(prefix_of_key)))


@pytest.mark.parametrize("block", [1, 2, 3, 5])
def test_keys_of_tokens_and_of_ids_share_alike(block):
    """With as many tokens an id as a key, ids and token lists make the same keys."""
    interned: dict[tuple, int] = {}
    by_tokens, by_ids = [], []
    for tokens in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9, 9, 9], [2, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]):
        ends = range(block, len(tokens) + 1, block)
        ids = [interned.setdefault(tuple(tokens[:end]), len(interned)) for end in ends]
        by_tokens.append(token_list(tokens))
        by_ids.append(mooncake(len(ids) * block, 0, ids, block))
    assert keys_of(block, *by_tokens) == keys_of(block, *by_ids)
