"""Serves a checkpoint with HKV's cache: first come, first served, in chunks, preempting the last to come.

Everything between two tokens is one jitted function: scheduling, blocks, the forward pass over the pages, and sampling.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hkv
from examples.serve.checkpoint import Weights, read_config, read_weights
from examples.serve.families import FORWARD
from hkv import serving


@dataclasses.dataclass
class Request:
    """A prompt and what became of it.

    Attributes:
      tokens: the prompt; with what was generated, once it is done.
      new: tokens to generate.
      hits: tokens found in the cache each time it arrived: once, and once more after every preemption.
      logits: of every token that was computed for it, by its position.
    """

    tokens: list[int]
    new: int
    hits: list[int] = dataclasses.field(default_factory=list)
    logits: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)


class Engine:
    """A model, its cache, and rows of requests.

    Args:
      folder: the checkpoint.
      memory: bytes of the cache.
      rows: requests at the same time.
      budget: tokens of a step.
      longest: tokens of the longest request.
      block_size: tokens of a block.
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
    ) -> None:
        self.config, self.weights = read_config(folder), read_weights(folder)
        model = hkv.read_model(folder, dtype="float32", block_size=block_size)
        self.plan = hkv.plan(model, memory, max_model_len=longest, max_in_flight_tokens=budget)
        self.served = serving.from_plan(self.plan, rows=rows)
        self.history = jnp.zeros((rows, longest), jnp.int32)
        self.known, self.arrived = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self.running: dict[int, Request] = {}
        self.preempted, self._clock = 0, 0
        self._turn = jax.jit(functools.partial(_turn, self.config, budget), donate_argnums=(1, 2))

    def serve(self, requests: Sequence[Request]) -> None:
        """Serves all requests to their ends."""
        waiting, targets = collections.deque(requests), {id(each): len(each.tokens) + each.new for each in requests}
        held_back = False
        while waiting or self.running:
            free = [row for row in range(len(self.known)) if row not in self.running]
            # Who was preempted waits until a request is done: its hits would take the blocks that it gave back for.
            for row in free if not (held_back and self.running) else ():
                if waiting:
                    self._arrive(row, waiting.popleft())
            refused = self._step()
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
        text = np.zeros((1, self.history.shape[1]), np.int32)
        text[0, : len(request.tokens)] = request.tokens
        self.served, found = serving.arrive(
            self.served, jnp.array([row]), jnp.asarray(text), jnp.array([len(request.tokens)])
        )
        request.hits.append(int(found.hits[0]))
        self.history = self.history.at[row].set(text[0])
        self._clock += 1
        self.known[row], self.arrived[row] = len(request.tokens), self._clock
        self.running[row] = request

    def _step(self) -> int:
        """One step; the row that has to be preempted, -1 for none."""
        self.served, self.history, found = self._turn(
            self.weights, self.served, self.history, jnp.asarray(self.known), jnp.asarray(self.arrived)
        )
        rows, starts, positions, logits, said = (
            np.asarray(found[name]) for name in ("rows", "starts", "positions", "logits", "said")
        )
        for query, row in enumerate(rows.tolist()):
            if row < 0:
                continue
            request = self.running[row]
            for place in range(starts[query], starts[query + 1]):
                request.logits[int(positions[place])] = logits[place]
            if positions[starts[query + 1] - 1] + 1 == self.known[row]:
                request.tokens.append(int(said[query]))
                self.known[row] += 1
        return int(found["victim"])

    def _leave(self, row: int) -> Request:
        """A request is done, or has to wait again: it gives back its blocks, whose prefixes can still be found."""
        self.served, _ = serving.finish(self.served, jnp.array([row]))
        self.known[row] = 0
        return self.running.pop(row)


def _turn(
    config: dict[str, Any],
    budget: int,
    arrays: dict[str, jax.Array],
    served: serving.Serving,
    history: jax.Array,
    known: jax.Array,
    arrived: jax.Array,
) -> tuple[serving.Serving, jax.Array, dict[str, jax.Array]]:
    """One step of all rows: what they say next, greedily, goes into their history."""
    plan = serving.schedule(served, history, known, arrived, budget=budget)
    served, turn = serving.step(served, plan.tokens, plan.cu_q_lens, plan.rows)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array, **settings: Any) -> jax.Array:
        nonlocal served
        name = f"layers.{layer}"
        served = serving.write(served, name, turn, {"key": key, "value": value})
        return serving.attend(served, name, turn, query, **settings)

    forward = FORWARD[config["model_type"]]
    logits = forward(config, Weights(arrays), plan.tokens, jnp.maximum(turn.positions, 0), attend)
    last = jnp.maximum(plan.cu_q_lens[1:] - 1, 0)
    said = jnp.argmax(logits[last], axis=1).astype(jnp.int32)
    rows = jnp.where(turn.served, plan.rows, -1)
    at = jnp.where(turn.served & (turn.positions[last] + 1 == known[rows]), rows, history.shape[0])
    history = history.at[at, known[jnp.maximum(rows, 0)]].set(said, mode="drop")
    found = {"rows": rows, "starts": plan.cu_q_lens, "positions": turn.positions, "logits": logits, "said": said}
    return served, history, {**found, "victim": serving.victim(served, plan, turn, arrived)}
