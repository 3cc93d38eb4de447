"""Requests that arrive between steps find what the rules say they find, inside `jit`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.cache.arrivals import Arrivals, jitted
from hkv.dialects.vllm.traffic.hit_comparison import causes
from hkv.keys.fingerprint import ROOT
from hkv.state.status import Status
from reference.hits import longest_hit_by_definition
from reference.keys import fingerprint
from tests.reference.build import config as build
from tests.step.sample import assert_same, configs
from tests.step.test_step import NO_ROOM, OK, Pair, R, T, drawn_tokens

P = 40


def arrivals(rows: dict[int, list[int]], root=ROOT, output=0) -> Arrivals:
    """Prompts by row, in order, of which up to `output` tokens were generated."""
    places, tokens, counts = np.full(R, -1, np.int32), np.zeros((R, P), np.int32), np.zeros(R, np.int32)
    for index, (row, prompt) in enumerate(rows.items()):
        places[index], counts[index] = row, len(prompt)
        tokens[index, : len(prompt)] = prompt
    return Arrivals(places, np.tile(np.uint32(root), (R, 1)), tokens, counts, np.maximum(counts - output, 0))


def arrive(pair: Pair, rows: dict[int, list[int]], root=ROOT, output=0) -> list[int]:
    """Both caches take the requests; returns their hits, which are compared."""
    config = pair.rows.config
    found = {row: has_entry(pair, prompt, root) for row, prompt in rows.items()}
    defined = [longest_hit_by_definition(config, found[row], len(prompt)) for row, prompt in rows.items()]
    pair.state, result = jitted(pair.parameters, pair.state, arrivals(rows, root, output))
    assert result.status.tolist() == [OK] * R
    assert result.hits.tolist()[: len(rows)] == defined
    lengths = {row: max(len(prompt) - output, 0) for row, prompt in rows.items()}
    assert [pair.rows.arrive(row, prompt, root, lengths[row]) for row, prompt in rows.items()] == defined
    return defined


def has_entry(pair: Pair, prompt: list[int], root):
    """Predicate on a group and a length: it holds an entry for that prefix of a prompt in the reference's key table."""
    size, ahead = pair.rows.config.hash_block_size, pair.rows.config.hash_lookahead
    whole = np.array(prompt[: len(prompt) // size * size], np.int64).reshape(-1, size)
    after = [prompt[end : end + ahead] for end in range(size, len(prompt) - ahead + 1, size)]
    keys = [fingerprint.ahead(*pair) for pair in zip(fingerprint.keys(whole, root), after, strict=False)]

    def has(group: int, end: int) -> bool:
        return 0 < end <= len(keys) * size and end % size == 0 and (group, keys[end // size - 1]) in pool.table

    pool = pair.rows.manager.pool
    return has


def plain(config) -> bool:
    """True if lookup's iteration is the definition for requests of any length."""
    return not any(causes(config, tokens) for tokens in range(1, 49))


Texts = list[list[int]]


def two_texts(data, length: int) -> Texts:
    """Two texts, of which prompts are beginnings."""
    return [[data.draw(st.integers(0, 1)) for _ in range(length)] for _ in range(2)]


def turnover(
    pair: Pair, data, texts: Texts, lengths: st.SearchStrategy[int], stay: int = 3
) -> tuple[dict[int, list[int]], set[int]]:
    """Ends some rows, one of `stay` + 1; answers prompts for some of the empty ones, yet to arrive, and who ended."""
    new, ended = {}, set()
    for row in range(R):
        if pair.rows.names[row] is not None:
            if data.draw(st.integers(0, stay)) == 0:
                pair.finish(row)
                ended.add(row)
        elif data.draw(st.integers(0, 2)) > 0:
            new[row] = data.draw(st.sampled_from(texts))[: data.draw(lengths)]
    return new, ended


def unfinished(
    pair: Pair, data, lengths: list[int], rounds: tuple[int, int], stay: int
) -> Iterator[dict[int, list[int]]]:
    """Rows end and prompts of `lengths` tokens arrive in each round; before each step, the prompts of running rows."""
    texts = two_texts(data, lengths[-1])
    waiting: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(*rounds))):
        new, ended = turnover(pair, data, texts, st.sampled_from(lengths), stay)
        arrive(pair, new, output=data.draw(st.sampled_from((0, 0, 0, 3))))
        waiting = {row: prompt for row, prompt in waiting.items() if row not in ended} | new
        assert_same(pair.rows, pair.state)
        for _ in range(data.draw(st.integers(1, 4))):
            yield waiting


@settings(max_examples=60)
@given(config=configs(least_blocks=12).filter(plain), data=st.data())
def test_arrivals_are_lookups_and_adoptions_in_order(config, data):
    pair = Pair(config)
    longest = min(P, 48 - T, min(config.block_sizes) * 20 - T)
    texts = two_texts(data, longest)
    for _ in range(data.draw(st.integers(3, 8))):
        new, _ = turnover(pair, data, texts, st.integers(1, longest))
        arrive(pair, new, output=data.draw(st.sampled_from((0, 0, 3, P))))
        assert_same(pair.rows, pair.state)
        for _ in range(data.draw(st.integers(1, 4))):
            tokens = drawn_tokens(data, pair)
            for row, prompt in new.items():
                request = pair.rows.request(row)
                rest = prompt[request.num_computed :][:T]
                tokens[row] = rest or tokens[row]
            status = pair.step(tokens)
            new = {row: prompt for row, prompt in new.items() if status[row] in (OK, NO_ROOM)}


@settings(max_examples=30)
@given(config=configs(least_blocks=30), data=st.data())
def test_hits_are_those_of_the_definition_whatever_the_iteration_finds(config, data):
    pair = Pair(config)
    longest = min(30, 48 - T, min(config.block_sizes) * 20 - T)
    base = [data.draw(st.integers(0, 1)) for _ in range(longest)]
    for row in range(2):
        prompt = base[: data.draw(st.integers(1, longest))]
        pair.start(row)
        for first in range(0, len(prompt), T):
            pair.step([prompt[first : first + T] if other == row else [] for other in range(R)])
    prompt = base[: data.draw(st.integers(1, longest))]
    defined = longest_hit_by_definition(config, has_entry(pair, prompt, ROOT), len(prompt))
    _, result = jitted(pair.parameters, pair.state, arrivals({3: prompt, 4: prompt}))
    assert result.hits.tolist() == [defined, defined, 0, 0, 0]
    for group in range(len(config.topology.specs)):
        assert defined <= int(result.alone[0, group])


def test_other_roots_find_nothing():
    pair = Pair(build("full:2", num_blocks=60))
    pair.start(0)
    pair.step([[1, 2, 3, 4, 5, 6], [], [], [], []])
    assert arrive(pair, {1: [1, 2, 3, 4, 5, 6]}, (1, 2, 3, 4)) == [0]
    assert arrive(pair, {2: [1, 2, 3, 4, 5, 6]}) == [4]


def test_keys_that_share_their_first_word_are_told_apart():
    pair = Pair(build("full:2", num_blocks=60))
    pair.start(0)
    pair.step([[1, 2, 3, 4], [], [], [], []])
    keys = np.array(pair.state.keys)
    keys[int(np.asarray(pair.state.rows)[0, 0, 1]), 1] ^= 1
    changed = type(pair.state)(**{**vars(pair.state), "keys": keys})
    _, result = jitted(pair.parameters, changed, arrivals({1: [1, 2, 3, 4, 5]}))
    assert result.hits.tolist()[0] == 2


@pytest.mark.parametrize(
    ("row", "count", "status"),
    [
        (0, 4, Status.NOT_WAITING),
        (99, 4, Status.NO_SUCH_SLOT),
        (1, P + 1, Status.OUT_OF_RANGE),
        (1, -1, Status.OUT_OF_RANGE),
    ],
)
def test_misuse_takes_nothing_and_says_why(row, count, status):
    pair = Pair(build("full:2", num_blocks=60))
    pair.start(0)
    new = arrivals({row: [1] * 4})
    new.counts[0] = count
    before = {name: np.array(value) for name, value in vars(pair.state).items()}
    state, result = jitted(pair.parameters, pair.state, new)
    assert result.status.tolist()[0] == status
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(state, name), value)


def test_a_prompt_that_no_row_can_hold_is_refused():
    pair = Pair(build("full:2", num_blocks=60, max_model_len=16))
    _, result = jitted(pair.parameters, pair.state, arrivals({1: [1] * 20}))
    assert result.status.tolist()[0] == Status.ROW_FULL
