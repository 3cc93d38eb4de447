"""Requests that arrive between steps find what the rules say they find, inside `jit`.

So do those that find blocks which came from outside; keys that cover tokens after their blocks have programs of their
own (`tests/slow/step/test_keys_ahead.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.cache.arrivals import Arrivals, jitted
from hkv.cache.insertion import insert
from hkv.cache.state import require_expressible
from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.kinds import of_kind
from hkv.dialects.vllm.traffic.hit_comparison import causes
from hkv.errors import ConfigError
from hkv.keys.fingerprint import ROOT
from hkv.model.topology import Topology
from hkv.spec import spec_from_log
from hkv.state.status import Status
from reference.hits import longest_hit_by_definition
from reference.keys import fingerprint
from tests.reference.build import config as build
from tests.step.sample import assert_same, configs
from tests.step.test_step import NO_ROOM, OK, Pair, R, T, drawn, drawn_tokens, padded

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
    return [drawn(data, length, st.integers(0, 1)) for _ in range(2)]


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


def drive(pair: Pair, data, longest: int, outputs: tuple[int, ...] = (0,)) -> None:
    """Prompts arrive, of which up to one of `outputs` tokens were generated, and are computed, others in between."""
    texts = two_texts(data, longest)
    for _ in range(data.draw(st.integers(3, 8))):
        new, _ = turnover(pair, data, texts, st.integers(1, longest))
        arrive(pair, new, output=data.draw(st.sampled_from(outputs)))
        assert_same(pair.rows, pair.state)
        for _ in range(data.draw(st.integers(1, 4))):
            tokens = drawn_tokens(data, pair)
            for row, prompt in new.items():
                request = pair.rows.request(row)
                tokens[row] = prompt[request.num_computed if request else 0 :][:T] or tokens[row]
            status = pair.step(tokens)
            new = {row: prompt for row, prompt in new.items() if status[row] in (OK, NO_ROOM)}


@settings(max_examples=60)
@given(config=configs(least_blocks=12).filter(plain), data=st.data())
def test_arrivals_are_lookups_and_adoptions_in_order(config, data):
    drive(Pair(config), data, min(P, 48 - T, min(config.block_sizes) * 20 - T), (0, 0, 3, P))


@settings(max_examples=30)
@given(config=configs(least_blocks=30), data=st.data())
def test_hits_are_those_of_the_definition_whatever_the_iteration_finds(config, data):
    pair = Pair(config)
    longest = min(30, 48 - T, min(config.block_sizes) * 20 - T)
    base = drawn(data, longest, st.integers(0, 1))
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


K = 12
inserted = jax.jit(insert, donate_argnums=0)


def both(pair: Pair, entries) -> list[int] | None:
    """Both caches take the entries; the new blocks, None for a refusal."""
    groups, keys = np.full(K, -1, np.int32), np.zeros((K, 4), np.uint32)
    for lane, (group, key) in enumerate(entries):
        groups[lane], keys[lane] = group, key
    want = pair.rows.insert(entries)
    pair.state, blocks, status = inserted(pair.state, groups, keys)
    assert int(status) == (Status.NO_ROOM if want is None else Status.OK)
    assert blocks.tolist() == (want or []) + [-1] * (K - len(want or []))
    assert_same(pair.rows, pair.state)
    return want


@settings(max_examples=40)
@given(config=configs(least_blocks=12).filter(lambda config: config.caching and plain(config)), data=st.data())
def test_what_is_inserted_is_found_evicted_and_given_back_like_any_block(config, data):
    pair = Pair(config)
    longest = min(40, 48 - T, min(config.block_sizes) * 20 - T)
    base = drawn(data, longest, st.integers(0, 1))
    size, specs = config.hash_block_size, config.topology.specs
    whole = np.array(base[: longest // size * size], np.int64).reshape(-1, size)
    keys = [tuple(int(word) for word in key) for key in fingerprint.keys(whole, ROOT)]
    ends = [
        (group, keys[end // size - 1])
        for group, spec in enumerate(specs)
        if spec.prefix_cacheable
        for end in range(config.block_size(group), len(keys) * size + 1, config.block_size(group))
    ]
    for _ in range(data.draw(st.integers(2, 5))):
        both(pair, data.draw(st.lists(st.sampled_from(ends), max_size=K)) if ends else [])
        new = {}
        for row in range(R):
            if pair.rows.names[row] is None and data.draw(st.booleans()):
                new[row] = base[: data.draw(st.integers(1, longest))]
            elif pair.rows.names[row] is not None and data.draw(st.booleans()):
                pair.finish(row)
        arrive(pair, new)
        pair.step(drawn_tokens(data, pair))


@pytest.mark.parametrize("group", [-2, 7])
def test_a_group_that_does_not_exist_is_refused(group):
    pair = Pair(build("full:2", num_blocks=9))
    groups = np.array([0, group] + [-1] * (K - 2), np.int32)
    state, blocks, status = inserted(pair.state, groups, np.ones((K, 4), np.uint32))
    assert int(status) == Status.OUT_OF_RANGE
    assert blocks.tolist() == [-1] * K
    assert not np.asarray(state.refs).any()


def test_what_would_be_lost_is_refused():
    with pytest.raises(ConfigError, match="hash_lookahead = 1: expected 0 where hits end inside blocks"):
        padded(build("full:2,mamba:4", num_blocks=8, hash_block_size=2, partial_hits=True, hash_lookahead=1))
    with pytest.raises(ConfigError, match="hash_lookahead = 65: expected at most 64 tokens"):
        padded(build("full:2", num_blocks=8, hash_lookahead=65))


@pytest.mark.parametrize("kind", ["cross_attention", "replayed_window"])
def test_kinds_that_steps_do_not_have_are_refused(kind):
    spec = spec_from_log(of_kind(kind).draw(RandomChoices(0), 2, "core", 1))
    with pytest.raises(ConfigError, match=rf"groups\[0\]\.kind = '{kind}'"):
        require_expressible(_alone(spec))


def _alone(spec):
    sizes = {"hash_block_size": spec.block_size, "scheduler_block_size": spec.block_size}
    return VllmConfig(topology=Topology.of_specs([spec]), num_blocks=8, caching=False, **sizes)
