"""Equal keys mean equal prefixes, whatever the block size, and nothing else does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hkv.replay.traces.interned import InternedTrace, PrefixKeys
from hkv.replay.traces.reader import TraceRequest


def mooncake(length, output, *ids):
    return TraceRequest(line=1, timestamp=0, input_length=length, output_length=output, hash_ids=list(ids))


def token_list(tokens, output_tokens=None, output_length=0):
    length = output_length if output_tokens is None else len(output_tokens)
    return TraceRequest(
        line=1, timestamp=0, input_length=len(tokens), output_length=length, tokens=tokens, output_tokens=output_tokens
    )


def test_tokens_beyond_the_last_id_have_no_name():
    keys = PrefixKeys(4, tokens_per_id=8)
    assert keys.of(mooncake(12, 0, 1)).tolist() == [0, 1, 2]
    assert keys.of(mooncake(12, 0, 1)).tolist() == [0, 1, 3]


def test_a_second_turn_finds_the_answer_of_the_first():
    keys = PrefixKeys(2)
    first = keys.of(token_list([1, 2, 3], [4, 5]))
    second = keys.of(token_list([1, 2, 3, 4, 5, 6]))
    assert first.tolist() == [0, 1]
    assert second.tolist() == [0, 1, 2]
    unnamed = keys.of(token_list([1, 2, 3], output_length=3))
    assert unnamed.tolist() == [0, 3, 4]


@given(
    requests=st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=14), st.integers(0, 9)), min_size=1, max_size=8),
    hash_block=st.integers(1, 12),
    per_id=st.integers(1, 8),
)
def test_equal_keys_are_equal_prefixes_of_ids(requests, hash_block, per_id):
    """Tokens are drawn; ids are made of them as a trace's would be; keys must tell apart what the tokens do."""
    keys = PrefixKeys(hash_block, per_id)
    interned: dict[tuple, int] = {}
    prefix_of_key: dict[int, tuple] = {}
    for tokens, output in requests:
        tokens = [*tokens, 0]
        ends = range(per_id, len(tokens) + per_id, per_id)
        ids = [interned.setdefault(tuple(tokens[:end]), len(interned)) for end in ends]
        made = keys.of(mooncake(len(tokens), output, *ids))
        assert made.dtype == np.int64
        assert len(made) == (len(tokens) + output) // hash_block
        assert len(set(made.tolist())) == len(made)
        for index, key in enumerate(made.tolist()):
            end = (index + 1) * hash_block
            known = end <= len(tokens)
            prefix = tuple(tokens[:end]) if known else ("generated", id(made), index)
            assert prefix_of_key.setdefault(key, prefix) == prefix
    assert max(prefix_of_key, default=-1) < keys.count


@pytest.mark.parametrize("hash_block", [1, 2, 3, 5])
def test_keys_of_tokens_and_of_ids_share_alike(hash_block):
    """With as many tokens an id as a key, ids and token lists make the same keys."""
    by_tokens, by_ids = PrefixKeys(hash_block), PrefixKeys(hash_block, tokens_per_id=hash_block)
    interned: dict[tuple, int] = {}
    for tokens in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9, 9, 9], [2, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]):
        ends = range(hash_block, len(tokens) + hash_block, hash_block)
        ids = [interned.setdefault(tuple(tokens[:end]), len(interned)) for end in ends]
        whole = len(tokens) // hash_block
        first = by_tokens.of(token_list(tokens)).tolist()
        second = by_ids.of(mooncake(whole * hash_block, 0, *ids[:whole])).tolist()
        assert first == second


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 9), st.lists(st.integers(0, 2), max_size=4)),
        min_size=1,
        max_size=8,
    ),
    hash_block=st.integers(1, 12),
    per_id=st.integers(1, 8),
    most=st.sampled_from([15, 25, 100]),
)
def test_a_whole_trace_of_ids_is_interned_at_once(requests, hash_block, per_id, most):
    """Ids are made of paths, so that equal ones stand after equal ones; the keys are those of one request at a time."""
    names: dict[tuple, int] = {}
    trace = []
    for length, output, path in requests:
        ids = [
            names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(min(len(path), -(-length // per_id)))
        ]
        trace.append(
            TraceRequest(
                line=1, timestamp=0, input_length=length, output_length=output, hash_ids=ids, tokens_per_id=per_id
            )
        )
    one_by_one, found = PrefixKeys(hash_block, per_id), InternedTrace(trace).keys(hash_block, most)
    for index, request in enumerate(trace):
        served = request.input_length + request.output_length <= most
        assert found.of(index).tolist() == (one_by_one.of(request).tolist() if served else [])
