"""Exploring finds every state there is and no other, and the shortest way to a defect."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.vllm.explorer import Report, Space, explore
from hkv.dialects.vllm.explorer.search import Visited
from hkv.dialects.vllm.explorer.space import definitions
from hkv.dialects.vllm.explorer.transition import FORMS, Program, World, start
from hkv.dialects.vllm.rules.operations import Code
from hkv.errors import ConfigError
from hkv.spec import FullAttention, Mamba, SlidingWindow
from hkv.state.state import State
from reference.hits import longest_hit_by_definition
from tests.testing.plain_explorer import (
    CHUNK,
    GROUPS,
    PlainExplorer,
    cache_state,
    name_of,
    space,
    standings,
    unpack_many,
)


@pytest.fixture(scope="module")
def explored() -> tuple[Space, Report, np.ndarray]:
    """A space of a few thousand states, what exploring it reports, and its worlds."""
    small, found = space(), []
    report = explore(small, chunk=CHUNK, observe=lambda worlds: found.append(worlds))
    return small, report, np.concatenate([start(small)[None], *found])


def test_a_correct_cache_is_exhausted(explored: tuple[Space, Report, np.ndarray]) -> None:
    _, report, worlds = explored
    assert report.exhausted
    assert report.counterexample is None
    assert report.states == len(worlds) > 1000
    assert sum(report.by_operation.values()) == report.transitions > report.states
    assert report.share(report.evictions) > 0.1
    assert report.refusals > 0


def test_it_reaches_the_states_that_the_reference_reaches(explored: tuple[Space, Report, np.ndarray]) -> None:
    """The same names, by trying every renaming, as from a search over the NumPy engine."""
    small, _, worlds = explored
    plain = PlainExplorer(small)
    wanted, _ = plain.explore()
    unpacked = jax.device_get(unpack_many(small)(worlds))
    names = {code: tuple(int(bit) for bit in f"{code:b}"[1:]) for code in range(1, small.buckets.keys)}
    keys = {code.to_bytes(8, "big").hex(): tokens for code, tokens in names.items()}
    found = set()
    for i in range(len(worlds)):
        world = jax.tree.map(lambda leaf, i=i: leaf[i], unpacked)
        found.add(name_of(cache_state(small, world.state), standings(world), keys))
    assert found == wanted
    assert len(found) <= len(worlds)


@given(data=st.data())
@settings(max_examples=40)
def test_names_know_no_ids(explored: tuple[Space, Report, np.ndarray], data: st.DataObject) -> None:
    """Renamed blocks and requests do not change a state's name, nor does where its queue lies."""
    small, _, worlds = explored
    place = data.draw(st.integers(0, len(worlds) - 1))
    world = jax.tree.map(lambda leaf: leaf[0], jax.device_get(unpack_many(small)(worlds[place : place + 1])))
    blocks = np.array([0, *(1 + np.array(data.draw(st.permutations(range(small.config.num_blocks - 1)))))])
    slots = np.array(data.draw(st.permutations(range(small.requests))))
    renamed = _renamed(world, blocks, slots, data.draw(st.integers(-5, 5)))
    assert _name(small, renamed) == _name(small, world)


def test_different_states_have_different_names(explored: tuple[Space, Report, np.ndarray]) -> None:
    small, _, worlds = explored
    step = np.broadcast_to(np.array([Code.STEP, 0, 0, 0], np.int32), (CHUNK, 4))
    program, names = Program(small), []
    for begin in range(0, len(worlds), CHUNK):
        part = worlds[begin : begin + CHUNK]
        filled = np.concatenate([part, np.broadcast_to(part[:1], (CHUNK - len(part), part.shape[1]))])
        names.append(np.asarray(program(filled, step).name)[: len(part)])
    assert len(np.unique(np.concatenate(names), axis=0)) == len(worlds)


def _name(small: Space, world: World) -> bytes:
    stacked = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (CHUNK, *np.shape(leaf))), world)
    words = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(world)])
    words = np.where(words > 1 << 20, np.iinfo(np.int16).max, words).astype(np.int16)
    nothing = np.broadcast_to(np.array([Code.STEP, 0, 0, 0], np.int32), (CHUNK, 4))
    zeros = np.zeros((CHUNK, 2), np.int32)
    outcome = Program(small).assess(np.broadcast_to(words, (CHUNK, len(words))), nothing, stacked.state, zeros)
    return np.asarray(outcome.name)[0].tobytes()


def _renamed(world: World, blocks: np.ndarray, slots: np.ndarray, turn: int) -> World:
    """The same state with other ids: block b is called `blocks[b]`, slot i holds what `slots[i]` held."""
    state: Any = world.state
    ledger, count = world.ledger, len(blocks)

    def by_block(array: np.ndarray) -> np.ndarray:
        new = array.copy()
        new[blocks] = array[:count]
        return new

    ring = len(state.queue) - 1
    queue = state.queue.copy()
    queue[:-1] = np.roll(blocks[state.queue[:-1]], turn)
    places = np.where(state.blocks > 0, (state.blocks - 1 + turn) % ring + 1, state.blocks)
    counters = state.counters.copy()
    counters[:2] += turn
    table = np.where(state.table > 0, (blocks[np.maximum(state.table, 0) >> 3] << 3) | (state.table & 7), state.table)
    table[:, -1] = state.table[:, -1]
    links = np.where(state.links < count, blocks[np.clip(state.links, 0, count - 1)], state.links)
    rows, requests, chains = state.rows.copy(), state.requests.copy(), state.chains.copy()
    for new, old in ((rows, blocks[state.rows]), (requests, state.requests), (chains, state.chains)):
        new[:-1] = old[:-1][slots]
    new_state: Any = {
        "queue": queue,
        "blocks": by_block(places),
        "keys": by_block(state.keys),
        "table": table,
        "links": by_block(links),
        "rows": rows,
        "chains": chains,
        "requests": requests,
        "counters": counters,
    }
    return World(State(**new_state), ledger[slots])


def test_both_forms_explore_the_same() -> None:
    """Worlds stepped one after the other and side by side: as many states and operations of each sort, and no more."""
    tiny = space(GROUPS[0], num_blocks=3, length=1, without=("evict", "reset", "delay", "drop", "parts"))
    reports = [explore(tiny, form=form, chunk=64) for form in FORMS]
    same = ("states", "transitions", "depth", "evictions", "refusals", "by_operation", "exhausted", "counterexample")
    assert [getattr(reports[0], name) for name in same] == [getattr(reports[1], name) for name in same]
    assert reports[0].exhausted
    assert reports[0].states == 99


def test_limits_end_a_search() -> None:
    small = space()
    report = explore(small, chunk=CHUNK, limit_states=500)
    assert 500 <= report.states < 500 + 2 * CHUNK * 10
    assert not report.exhausted
    assert explore(small, chunk=CHUNK, seconds=1e-9).states == 1


@given(st.lists(st.lists(st.integers(0, 40), max_size=60), max_size=8))
@settings(max_examples=60)
def test_visited_is_a_set(batches: list[list[int]]) -> None:
    visited, seen = Visited(places=16), set()
    for batch in batches:
        names = np.array([[n % 3, n % 2, n, 7] for n in batch], np.uint32).reshape(-1, 4)
        wanted = []
        for n in batch:
            wanted.append(n not in seen)
            seen.add(n)
        assert visited.add(names).tolist() == wanted
    assert len(visited) == len(seen)


@given(data=st.data())
@settings(max_examples=60)
def test_proofs_are_the_definition_of_a_hit(data: st.DataObject) -> None:
    """The tables say what `reference.hits` says, for every set of entries."""
    specs = data.draw(
        st.sampled_from(
            [
                GROUPS,
                (FullAttention(block_size=2), SlidingWindow(block_size=1, window=3)),
                (FullAttention(block_size=1), Mamba(block_size=1)),
            ]
        )
    )
    small = space(*specs, length=4, eagle=data.draw(st.booleans()))
    define, longest, unit = definitions(small), 4, small.config.hash_block_size
    entries = np.zeros((len(specs), longest + 1), bool)
    for group, end in itertools.product(range(len(specs)), range(unit, longest + 1, unit)):
        entries[group, end] = data.draw(st.booleans())
    tokens = data.draw(st.integers(1, longest))
    satisfied = np.any(define.proofs & entries, axis=(2, 3)) | ~define.proven
    possible = np.all(satisfied, axis=1) & define.aligned & (np.arange(longest + 1) < tokens)
    there = lambda group, end: bool(end <= min(tokens, longest) and entries[group, end])  # noqa: E731
    wanted = longest_hit_by_definition(small.config, there, tokens)
    entries[:, tokens + 1 :] = False
    satisfied = np.any(define.proofs & entries, axis=(2, 3)) | ~define.proven
    possible = np.all(satisfied, axis=1) & define.aligned & (np.arange(longest + 1) < tokens)
    assert max(np.flatnonzero(possible), default=0) == wanted


@pytest.mark.parametrize(
    ("changes", "argument"),
    [({"requests": 5}, "requests"), ({"prompt": 3}, "prompt"), ({"without": frozenset({"nothing"})}, "without")],
)
def test_refuses_what_it_cannot_explore(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Space(config=space().config, **changes)
    assert raised.value.argument == argument


def test_refuses_rules_without_judges() -> None:
    for changes, argument in (({"caching": False}, "caching"), ({"hash_lookahead": 1}, "hash_lookahead")):
        with pytest.raises(ConfigError) as raised:
            space(**changes)
        assert raised.value.argument == argument
    with pytest.raises(ConfigError, match="no state is copied"):
        space(Mamba(block_size=2), FullAttention(block_size=1))
