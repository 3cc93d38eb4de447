"""Serves a checkpoint with HKV's cache: first come, first served, in chunks, preempting the last to come.

A turn is one jitted function: scheduling, blocks, and the forward pass over the pages, drafts included. The cache is in
debug mode, so that a layer which reads what none has written is named.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import hkv
from examples.serve.cached import Cached
from examples.serve.checkpoint import Weights, read_config, read_weights
from examples.serve.families import FORWARD
from hkv import serving
from hkv.dialects.vllm.planning.engine_options import EngineOptions

HEADS = "heads"
"""The mesh axis whose devices have a share of the heads in their pools."""


@dataclasses.dataclass
class Request:
    """A prompt and what became of it.

    Attributes:
      tokens: the prompt, and what was generated.
      new: tokens to generate.
      hits: tokens found in the cache each time it arrived: once, and once more after every preemption.
      logits: of every token that was computed for it, by its position; not of drafts that did not stay.
      accepted: drafts that stayed.
      rejected: drafts that did not.
    """

    tokens: list[int]
    new: int
    hits: list[int] = dataclasses.field(default_factory=list)
    logits: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    accepted: int = 0
    rejected: int = 0


class Engine:
    """A model, its cache, and rows of requests.

    Args:
      folder: the checkpoint.
      memory: bytes of the cache on each device.
      rows: requests at the same time.
      budget: tokens of a step.
      longest: tokens of the longest request.
      block_size: tokens of a block; recurrent layers may ask for larger ones.
      match_unit: tokens between two lengths at which hits may end, inside blocks too; None where hits end with blocks.
      layout: physical order of the pages; None for the first that can express the model.
      devices: devices that share the heads of the cache.
      draft: proposes tokens after those of a request, for the model to accept or not; None for no drafts.
      limit: says before each step how many tokens of a row it may compute at most; None for as many as fit.
      offload: a tier that keeps what is computed, and gives it to engines that have not; None for none.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        memory: int,
        *,
        rows: int = 4,
        budget: int = 16,
        longest: int = 128,
        block_size: int = 16,
        match_unit: int | None = None,
        layout: str | None = None,
        devices: int = 1,
        draft: Callable[[list[int]], list[int]] | None = None,
        limit: Callable[[], int] | None = None,
        offload: serving.Offload | None = None,
    ) -> None:
        self.config, self.weights = read_config(folder), read_weights(folder)
        model = hkv.read_model(
            folder, dtype="float32", block_size=block_size, tensor_parallel=devices, gdn_prefill="triton"
        )
        options = None if match_unit is None else EngineOptions(prefix_match_unit=match_unit)
        self.plan = hkv.plan(
            model, memory, layout=layout, max_model_len=longest, max_in_flight_tokens=budget, options=options
        )
        self.served = serving.from_plan(self.plan, rows=rows, debug=True)
        self.history = np.zeros((rows, longest), np.int32)
        self.known, self.arrived = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self.running: dict[int, Request] = {}
        self.preempted, self._clock, self._draft, self._limit = 0, 0, draft, limit
        self._offload = offload
        turn = functools.partial(_turn, self.config, budget, HEADS if devices > 1 else None)
        if devices > 1:
            turn = self._shared(turn, devices)
        self._turn = jax.jit(checkify.checkify(turn), donate_argnums=1)

    def serve(self, requests: Sequence[Request]) -> None:
        """Serves all requests to their ends."""
        waiting, targets = collections.deque(requests), {id(each): len(each.tokens) + each.new for each in requests}
        held_back = False
        while waiting or self.running:
            free = [row for row in range(len(self.known)) if row not in self.running]
            # A preempted request waits until another one is done: its hits would take the blocks that it gave back for.
            for row in free if not (held_back and self.running) else ():
                if waiting:
                    self._arrive(row, waiting.popleft())
            refused = self._step(targets)
            if refused >= 0:
                if len(self.running) == 1:
                    raise ValueError("the cache has no room for one request alone")
                waiting.appendleft(self._leave(refused))
                self.preempted, held_back = self.preempted + 1, True
            for row, request in list(self.running.items()):
                if len(request.tokens) >= targets[id(request)]:
                    self._leave(row)
                    held_back = False

    def _arrive(self, row: int, request: Request) -> None:
        """A request takes an empty row, with the longest prefix that the cache has."""
        count = len(request.tokens)
        self.history[row, :count] = request.tokens
        if self._offload:
            self.served, _ = serving.load(self.served, self._offload, request.tokens)
        self.served, found = serving.arrive(
            self.served, jnp.array([row]), jnp.asarray(self.history[row : row + 1]), jnp.array([count])
        )
        request.hits.append(int(found.hits[0]))
        self._clock += 1
        self.known[row], self.arrived[row] = count, self._clock
        self.running[row] = request

    def _step(self, targets: dict[int, int]) -> int:
        """One step; the row that has to be preempted, -1 for none."""
        ends, draft = self.known.copy(), self._draft
        for row, request in self.running.items():
            most = targets[id(request)] - len(request.tokens) - 1
            drafts = draft(request.tokens)[:most] if draft else []
            ends[row] += len(drafts)
            self.history[row, self.known[row] : ends[row]] = drafts
        if self._limit:
            ends = np.minimum(ends, np.asarray(self.served.cache.computed) + self._limit())
        asked = (jnp.asarray(array) for array in (self.history, self.known, ends, self.arrived))
        error, (self.served, found) = self._turn(self.weights, self.served, *asked)
        error.throw()
        rows, starts, positions, logits = (
            np.asarray(found[name]) for name in ("rows", "starts", "positions", "logits")
        )
        for query, row in enumerate(rows.tolist()):
            if row >= 0:
                places = range(starts[query], starts[query + 1])
                self._take(row, {int(positions[place]): logits[place] for place in places})
                if self._offload:
                    serving.store(self.served, self._offload, row, self.running[row].tokens)
        return int(found["victim"])

    def _take(self, row: int, logits: dict[int, np.ndarray]) -> None:
        """Takes the logits of a row's tokens, and of drafts as long as the model would have said the same, greedily."""
        request, known = self.running[row], int(self.known[row])
        for position, found in logits.items():
            if position >= known and self.history[row, position] != request.tokens[-1]:
                request.rejected += len(logits) - list(logits).index(position)
                break
            request.accepted += position >= known
            request.logits[position] = found
            if position >= known - 1:
                request.tokens.append(int(np.argmax(found)))
        self.known[row] = len(request.tokens)
        self.history[row, known : self.known[row]] = request.tokens[known:]

    def _leave(self, row: int) -> Request:
        """A request is done, or has to wait again: it gives back its blocks, whose prefixes can still be found."""
        self.served, _ = serving.finish(self.served, jnp.array([row]))
        self.known[row] = 0
        return self.running.pop(row)

    def _shared(self, turn: Callable[..., Any], devices: int) -> Callable[..., Any]:
        """The turn on devices that have a pool each, of their heads, and all else alike."""
        mesh = jax.make_mesh((devices,), (HEADS,), axis_types=(AxisType.Auto,))
        pool = np.zeros(devices * len(self.served.pool), np.uint32)
        pool = jax.device_put(pool, NamedSharding(mesh, PartitionSpec(HEADS)))
        self.served = dataclasses.replace(self.served, pool=pool)
        whole = PartitionSpec()
        split = dataclasses.replace(jax.tree.map(lambda _: whole, self.served), pool=PartitionSpec(HEADS))
        return jax.shard_map(turn, mesh=mesh, in_specs=(whole, split, *[whole] * 4), out_specs=(split, whole))


def _turn(
    config: dict[str, Any],
    budget: int,
    axis: str | None,
    arrays: dict[str, jax.Array],
    served: serving.Serving,
    history: jax.Array,
    known: jax.Array,
    ends: jax.Array,
    arrived: jax.Array,
) -> tuple[serving.Serving, dict[str, jax.Array]]:
    """One step of all rows up to `ends` at most, where drafts follow what is known: the logits of its tokens."""
    plan = serving.schedule(served, history, ends, arrived, budget=budget)
    row = jnp.maximum(plan.rows, 0)
    drafts = jnp.where(plan.rows >= 0, jnp.maximum(served.cache.computed[row] + plan.counts - known[row], 0), 0)
    served, turn = serving.step(served, plan.tokens, plan.cu_q_lens, plan.rows, drafts)
    cached = Cached(served, turn, drafts, axis)
    forward = FORWARD[config["model_type"]]
    logits = forward(config, Weights(arrays), plan.tokens, jnp.maximum(turn.positions, 0), cached)
    rows = jnp.where(turn.served, plan.rows, -1)
    found = {"rows": rows, "starts": plan.cu_q_lens, "positions": turn.positions, "logits": logits}
    return cached.served, {**found, "victim": serving.victim(served, plan, turn, arrived)}
