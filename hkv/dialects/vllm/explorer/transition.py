"""One operation on one world: performed, judged, named. `Program` does so for thousands of worlds at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.explorer import moves
from hkv.dialects.vllm.explorer.judges import JUDGES, REFUSALS, moment_of
from hkv.dialects.vllm.explorer.moves import ExplorerMove, Fact
from hkv.dialects.vllm.explorer.picture import name_of, picture, young
from hkv.dialects.vllm.explorer.space import Space, definitions
from hkv.dialects.vllm.rules import execute
from hkv.dialects.vllm.rules.operations import Code, Column, Results
from hkv.dialects.vllm.rules.parameters import UNLIMITED, Parameters
from hkv.machine.operations import Operations
from hkv.state.state import Counter, State

LANES, BATCHED = "lanes", "batched"
FORMS = (LANES, BATCHED)
"""Ways in which worlds are stepped together: one after the other in one native loop, which is faster on a CPU, or side
by side in vector instructions, as an accelerator wants it."""


def default_form() -> str:
    """The faster form on the backend in use."""
    return LANES if jax.default_backend() == "cpu" else BATCHED


NO_LIMIT = np.iinfo(np.int16).max
"""Value that stands for `UNLIMITED` in a packed world."""


class World(NamedTuple):
    """A cache, and what the operations so far say about its requests."""

    state: State
    ledger: jax.Array


class Outcome(NamedTuple):
    """Result of one operation.

    Attributes:
      world: int16[w], the world after it, packed.
      name: uint32[4], its canonical name.
      broken: uint32, a bit for each of `JUDGES` that is broken.
      enabled: bool[n], the operations that may follow.
      status: int32, status that the cache answered.
      evictions: int32, blocks that lost their keys because they were handed out.
      hits: int32[R], tokens that lookups found.
    """

    world: Any
    name: Any
    broken: Any
    enabled: Any
    status: Any
    evictions: Any
    hits: Any


def start(space: Space) -> np.ndarray:
    """The packed world in which nothing happened, int16[w]."""
    _, state = cache.init(space.config, space.buckets)
    return np.asarray(pack(World(state, np.zeros((space.requests, len(Fact)), np.int32))))  # type: ignore


def pack(world: World) -> jax.Array:
    """A world as int16[w]."""
    flat = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(world)])
    return jnp.where(flat == UNLIMITED, NO_LIMIT, flat).astype(jnp.int16)


def unpack(space: Space, words: Any) -> World:
    """The world that was packed."""
    shapes = jax.eval_shape(lambda: _blank(space))
    leaves, tree = jax.tree.flatten(shapes)
    found, place = [], 0
    for leaf in leaves:
        part = words[place : place + leaf.size].astype(jnp.int32)
        found.append(jnp.where(part == NO_LIMIT, UNLIMITED, part).reshape(leaf.shape))
        place += leaf.size
    return jax.tree.unflatten(tree, found)


def _blank(space: Space) -> World:
    _, state = cache.init(space.config, space.buckets)
    return World(jax.tree.map(jnp.asarray, state), jnp.zeros((space.requests, len(Fact)), jnp.int32))


class Program:
    """Performs one operation on each of many worlds, and judges and names the results.

    It is two compiled programs: the cache's, which is the same for all configurations of equal buckets, and the one
    that looks at it, in which the configuration is constant.

    Args:
      space: the space.
      form: one of `FORMS`.

    Attributes:
      space: as given.
      parameters: its configuration as data.
      perform: of the parameters, worlds and rows, the states after the operations, and int32[k, 2], status and
        longest prefix of the search that were answered.
      assess: judges and names: of worlds, rows, and both that `perform` returned.
    """

    def __init__(self, space: Space, form: str = LANES) -> None:
        self.space = space
        known = {int(code) for code in moves.all_moves(space)[:, 0]}
        only = tuple(code for code in cache.ALL if int(code) in known)
        parameters, _ = cache.init(space.config, space.buckets)
        self.parameters: Parameters = jax.device_put(parameters)
        self.perform = _performance(space, form, cache.pure(only=only), only)
        self.assess = _assessment(space)

    def __call__(self, worlds: Any, rows: Any) -> Outcome:
        """Results of operations, one on each world.

        Args:
          worlds: int16[k, w], packed worlds.
          rows: int32[k, 4], a `ExplorerMove` each.
        """
        state, answers = self.perform(self.parameters, worlds, rows)
        return self.assess(worlds, rows, state, answers)


def _side_by_side(
    only: tuple[Code, ...], parameters: Parameters, state: State, operations: Operations
) -> tuple[State, Results]:
    """`hkv.dialects.vllm.machine.pure` without its rule for `vmap`, which would put the worlds one after the other."""
    stacked = jax.tree.map(lambda x: jnp.expand_dims(x, 0), (parameters, state, operations))
    new = execute.execute(*stacked, only=only, ids=0, events=0)
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), new)


@functools.cache
def _performance(space: Space, form: str, pure: Callable[..., Any], only: tuple[Code, ...]) -> Callable[..., Any]:
    """Compiled once for each `pure`, of which there is a new one after `hkv.dialects.vllm.machine.forget_programs`."""
    step = pure if form == LANES else functools.partial(_side_by_side, only)
    return jax.jit(jax.vmap(functools.partial(_perform, space, step), in_axes=(None, 0, 0)))


def _perform(
    space: Space, step: Callable[..., tuple[State, Results]], parameters: Parameters, words: jax.Array, row: jax.Array
) -> tuple[State, jax.Array]:
    world = unpack(space, words)
    state, results = step(parameters, world.state, moves.operation(space, ExplorerMove(*row), world.ledger))
    return state, results.table[0, jnp.array([Column.STATUS, Column.SHARED_PREFIX])]


@functools.cache
def _assessment(space: Space) -> Callable[..., Outcome]:
    return jax.jit(jax.vmap(functools.partial(_assess, space)))


def _assess(space: Space, words: jax.Array, row: jax.Array, state: State, answers: jax.Array) -> Outcome:
    world, move = unpack(space, words), ExplorerMove(*row)
    before, after = picture(space, world.state), picture(space, state)
    moment = moment_of(space, definitions(space), move, (answers[0], answers[1]), (before, after), world.ledger)
    broken = jnp.uint32(0)
    for bit, judge in enumerate(JUDGES.values()):
        broken = broken | (judge(moment).astype(jnp.uint32) << bit)
    follows = moves.enabled(
        space, moves.all_moves(space), moment.ledger, after.hits, after.cached, jnp.any(young(state))
    )
    return Outcome(
        world=pack(World(state, moment.ledger)),
        name=name_of(space, state, after, moment.ledger),
        broken=broken,
        enabled=follows,
        status=answers[0],
        evictions=state.counters[Counter.EVICTIONS] - world.state.counters[Counter.EVICTIONS],
        hits=after.hits,
    )


def names_of(broken: int) -> list[str]:
    """The invariants whose bits are set."""
    return [name for bit, name in enumerate(JUDGES) if broken >> bit & 1]


REFUSED = tuple(map(int, REFUSALS))
"""Statuses of a refused allocation."""
