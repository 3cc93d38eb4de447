"""The tree of keys and its leaves in order of use, against the reference's, without any engine's rules."""

from __future__ import annotations

import random

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.state import tree
from hkv.state.nodes import (
    BARRED,
    CLOCK,
    LEAF,
    ORDER_WORDS,
    PINNED,
    PRESENT,
    Node,
    bitmap_levels,
    moved_nodes,
    places_of,
)
from hkv.state.pooled import PooledBuckets, PooledState, empty_pooled
from tests.rtp_llm.witness.prefix_tree import PrefixTree
from tests.rtp_llm.witness.resource import Dependency
from tests.state.pooled_program import STEPS, PooledProgram

BUCKETS = PooledBuckets(blocks=4, groups=1, pools=1, requests=1, sequences=1, row=1, chain=1, keys=300, names=2)
"""600 nodes, 1,200 places, three levels."""

ENTER, USE, LEAVE, MARK, FIRST, TOP = range(6)


def first(work, present, place, row):
    work, (found, node) = tree.first_from(work, present, row[0])
    return work.write("results", jnp.where(found == BUCKETS.places, -1, node), place)


def leave(work, present, place, row):
    """As under RTP-LLM's rules: what builds on a key that leaves are roots from then on."""
    node = row[0]
    work, (flags,) = work.peek(present, "nodes", work.node(node, Node.FLAGS))
    return tree.orphan(tree.leave(work, present, node), present & (flags != 0), node)


def top(work, present, place, row):
    work, node = tree.top(work, present, row[0])
    return work.write("results", node, place)


PROGRAM = PooledProgram(
    BUCKETS,
    {
        ENTER: lambda work, present, place, row: tree.enter(work, present, *row),
        USE: lambda work, present, place, row: tree.use(work, present, row[0]),
        LEAVE: leave,
        MARK: lambda work, present, place, row: tree.mark(work, present, *row[:2]),
        FIRST: first,
        TOP: top,
    },
    tree.WRITES,
)


def begun(clock: int) -> PooledState:
    """An empty tree whose next place is `clock`."""
    state = empty_pooled(BUCKETS, (4,))
    order = np.array(state.uses)
    order[CLOCK] = clock
    return state.replace(uses=order)  # type: ignore[arg-type]


def draw(rng: random.Random, model: PrefixTree, barred: set[int]) -> tuple[tuple[int, ...], int]:
    """One operation, performed on the model, and the answer to it."""
    present = [node for _, node in model.nodes]
    code = rng.choice([ENTER, ENTER, ENTER, USE, LEAVE, MARK, FIRST, TOP])
    node = rng.choice(NODES if code in (ENTER, LEAVE) or not present else present)
    flags = rng.choice([*[0] * (1 if code == MARK else 5), PINNED, BARRED, PINNED | BARRED])
    if code == FIRST:
        found = model.leaves()
        return (FIRST, 0), found[0][1] if found else -1
    if code == TOP and model.leaves():
        leaf = rng.choice(model.leaves())
        return (TOP, leaf[1]), model.chain(leaf)[-1][1]
    if code == ENTER:
        below = [other for other in NODES if other < node]
        above = [rng.choice(below)] if below and rng.random() < 0.85 else []
        _bar(barred, node, flags)
        model.upsert((0, node), Dependency(0, above[0] if above else None), bool(flags & PINNED))
        model.nodes[0, node].resident = bool(flags & PINNED)
        return (ENTER, node, above[0] + 1 if above else 0, flags), 0
    if code == LEAVE:
        model.remove(node)
        return (LEAVE, node), 0
    if code == MARK:
        if node in present:
            _bar(barred, node, flags)
            model.nodes[0, node].resident = bool(flags & PINNED)
        return (MARK, node, flags), 0
    if node in present:
        model.touch(node)
        return (USE, node), 0
    return (FIRST, places_of(BUCKETS.nodes)), -1


def _bar(barred: set[int], node: int, flags: int) -> None:
    (barred.add if flags & BARRED else barred.discard)(node)


NODES = [0, 1, 2, 5, 40, 41, 42, 300, 301, 598, 599]
"""Those that are used: few, so that they meet."""


@settings(max_examples=40)
@given(rng=st.randoms(use_true_random=False), clock=st.sampled_from([0, 31, 1020, 1150, 1199]))
def test_leaves_come_in_order_of_use(rng: random.Random, clock: int) -> None:
    """Places run out where they begin late, and the gaps are closed in between."""
    barred: set[int] = set()
    model = PrefixTree(lambda name: name[1] not in barred)
    drawn = [draw(rng, model, barred) for _ in range(STEPS)]
    state, answers = PROGRAM.run(begun(clock), [step for step, _ in drawn])
    assert answers == [answer for _, answer in drawn]
    nodes = np.asarray(state.nodes)
    assert leaves_of(nodes) == [node for _, node in model.leaves()]
    assert {node for node in range(600) if nodes[node, Node.FLAGS]} == {node for _, node in model.nodes}
    for name in model.nodes:
        flags, held = nodes[name[1], [Node.FLAGS, Node.HELD]]
        assert (held == 0 and not flags & PINNED) == model.subtree_evictable(name)
        assert children_of(nodes, name[1]) == {node for _, node in model.children(name)}
    found = leaves_of(nodes)[: STEPS // 2]
    places = [int(nodes[node, Node.PLACE]) - 1 for node in found]
    _, answers = PROGRAM.run(state, [(FIRST, place + more) for place in places for more in (0, 1)])
    following = [*leaves_of(nodes), -1]
    assert answers == [node for before, after in zip(found, following[1:], strict=False) for node in (before, after)]


def leaves_of(nodes: np.ndarray) -> list[int]:
    found = [node for node in range(600) if nodes[node, Node.FLAGS] & LEAF]
    assert all(nodes[node, Node.FLAGS] == PRESENT | LEAF for node in found)
    return sorted(found, key=lambda node: nodes[node, Node.PLACE])


def children_of(nodes: np.ndarray, node: int) -> set[int]:
    found, child = set(), nodes[node, Node.CHILD]
    while child:
        assert nodes[child - 1, Node.PARENT] == node + 1
        assert child - 1 not in found, "siblings form a circle"
        found.add(int(child - 1))
        child = nodes[child - 1, Node.NEXT]
    return found


@pytest.mark.parametrize("clock", [0, 1150])
def test_a_tree_moves_into_more_room(clock: int) -> None:
    """Everything is where it was, and the bitmap of leaves is that of the places, level by level."""
    rng, barred = random.Random(3), set()
    model = PrefixTree(lambda name: name[1] not in barred)
    state, _ = PROGRAM.run(begun(clock), [draw(rng, model, barred)[0] for _ in range(STEPS)])
    nodes, order = moved_nodes(np.asarray(state.nodes), np.asarray(state.uses), 40_000)
    np.testing.assert_array_equal(nodes[:600], state.nodes[:600])
    leaves, start = nodes[nodes[:, Node.FLAGS] & LEAF != 0, Node.PLACE] - 1, ORDER_WORDS
    for words in bitmap_levels(places_of(40_000)):
        bits = np.flatnonzero(np.unpackbits(order[start : start + words].view(np.uint8), bitorder="little"))
        assert bits.tolist() == sorted(set(leaves.tolist()))
        leaves, start = leaves // 32, start + words
    present = np.flatnonzero(nodes[:, Node.FLAGS])
    np.testing.assert_array_equal(order[start + nodes[present, Node.PLACE] - 1], present + 1)
    assert order[CLOCK] == state.uses[CLOCK]
