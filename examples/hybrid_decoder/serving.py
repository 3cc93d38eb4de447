"""The host's part: who arrives, who is preempted when blocks run out, who is done. It never sees a block id."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.hybrid_decoder import loop
from examples.hybrid_decoder.loop import COUNTS, Carry, Plan, Rows
from examples.hybrid_decoder.model import Model, weights_of
from hkv.cache import step as serving
from hkv.cache.arrivals import Arrivals
from hkv.cache.arrivals import jitted as arrive
from hkv.errors import ConfigError, OperationError
from hkv.keys.fingerprint import ROOT


@dataclasses.dataclass
class Request:
    """A prompt and what became of it.

    Attributes:
      tokens: the prompt; with what was generated, once it is done.
      target: how many tokens there shall be.
      prompt: tokens of the prompt.
      hits: tokens found in the cache each time it arrived: once, and once more after every preemption.
      logits: float32[tokens, vocabulary] of the tokens it computed itself, NaN for those found, if they are kept.
    """

    tokens: list[int]
    target: int
    prompt: int = 0
    hits: list[int] = dataclasses.field(default_factory=list)
    logits: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)


class Decoder:
    """Rows of requests, their cache and their pages, all on the device.

    Args:
      model: the sizes.
      rows: requests at the same time.
      num_blocks: blocks in the pool.
      chunk: tokens of a row in a turn of prefill.
      drafts: tokens guessed in a turn of decode.
      order: of the pages' axes, one that keeps a page together.
      kernel_block: tokens of the blocks that kernels see, None for the cache's.
      room: blocks that there are pages for, `num_blocks` by default; decoders with the same room share their programs.
      keep_logits: whether requests get their logits.
      audited: whether the loop watches itself (`audit`).
      seed: of the weights.

    Attributes:
      carry: everything that the loop changes.
      asked, found: tokens of all requests that arrived, and int64[G] those that each group by itself had; `adopted`
        those that all had.

    Raises:
      ConfigError: sizes that cannot be.
    """

    def __init__(
        self,
        model: Model,
        rows: int,
        num_blocks: int,
        *,
        chunk: int = 8,
        drafts: int = 0,
        order: str = "LBNHC",
        kernel_block: int | None = None,
        room: int | None = None,
        keep_logits: bool = False,
        audited: bool = False,
        seed: int = 0,
    ) -> None:
        if not 0 <= drafts < chunk:
            raise ConfigError("drafts", drafts, f"fewer than a chunk's {chunk} tokens")
        self.model, self.num_rows = model, rows
        self.config = model.config(num_blocks)
        room = num_blocks if room is None else room
        layouts = model.layouts(room, order, kernel_block)
        width = -(-model.longest // min(self.config.block_sizes))
        tokens = max(chunk, 2 * drafts + 1)
        self.plan = Plan(
            model=model,
            layouts=tuple(layouts.values()),
            chunk=chunk,
            drafts=drafts,
            room=2 * serving.room_for(self.config, queries=rows, tokens=rows * tokens),
            kernels=jax.default_backend() == "gpu" and not audited and not model.exact,
        )
        self.weights = weights_of(model, seed)
        parameters, state = serving.init(self.config, rows=rows, row=width, blocks=room)
        self.parameters = jax.device_put(parameters)
        groups = len(model.kinds)
        page = max(layout.page_size for layout in self.plan.layouts)
        self.page_bytes = page
        kept = rows if keep_logits else 0
        self.carry = jax.device_put(
            Carry(
                cache=state,
                pool=jnp.zeros(room * model.slots * page // 4, jnp.uint32),
                rows=Rows(jnp.zeros((rows, model.longest), jnp.int32), *(jnp.zeros(rows, jnp.int32) for _ in range(3))),
                refused=jnp.zeros(rows, bool),
                counts=jnp.zeros(len(COUNTS), jnp.int32),
                held=jnp.zeros(groups, jnp.int32),
                most=jnp.zeros(2, jnp.int32),
                logits=jnp.full((kept, model.longest, model.vocabulary), jnp.nan, jnp.float32),
                tags=jnp.zeros((room if audited else 0, max(self.config.block_sizes)), jnp.uint32),
            )
        )
        self.asked, self.adopted = 0, 0
        self.found = np.zeros(groups, np.int64)

    def arrive(self, requests: dict[int, Request]) -> None:
        """Requests take empty rows, with the longest prefix that the cache has of each.

        Raises:
          OperationError: a row that is not empty, or a request that is too long.
        """
        longest = self.model.longest
        places, counts = np.full(self.num_rows, -1, np.int32), np.zeros(self.num_rows, np.int32)
        tokens = np.zeros((self.num_rows, longest), np.int32)
        for index, (row, request) in enumerate(requests.items()):
            if not 0 < len(request.tokens) < request.target <= longest:
                raise OperationError("target", request.target, f"{len(request.tokens) + 1} to {longest} tokens")
            places[index], counts[index] = row, len(request.tokens)
            tokens[index, : counts[index]] = request.tokens
        roots = np.tile(np.array(ROOT, np.uint32), (self.num_rows, 1))
        arrivals = Arrivals(*map(jnp.asarray, (places, roots, tokens, counts)))
        cache, result = arrive(self.parameters, self.carry.cache, arrivals)
        if np.asarray(result.status).any():
            raise OperationError("rows", places.tolist(), "empty rows")
        hits = np.asarray(result.hits)
        targets = np.zeros(self.num_rows, np.int32)
        targets[: len(requests)] = [request.target for request in requests.values()]
        rows, logits = _place(self.carry.rows, self.carry.logits, places, tokens, counts, targets, result.hits)
        self.carry = self.carry._replace(cache=cache, rows=rows, logits=logits)
        for request, hit in zip(requests.values(), hits.tolist(), strict=False):
            request.hits.append(hit)
        self.asked += int(counts.sum())
        self.adopted += int(hits.sum())
        self.found += np.asarray(result.alone).sum(axis=0)

    def run(self, stop_early: bool = False) -> list[int]:
        """Prefill, then decode, until all rows are done or one is refused. Returns the rows that were refused.

        Args:
          stop_early: whether to come back as soon as any row is done.
        """
        stop = jnp.asarray(stop_early)
        for decoding in (False, True) if self.plan.chunk > self.plan.drafts + 1 else (True,):
            self.carry = self.program(decoding)(self.parameters, self.weights, self.carry, stop)
            refused = np.flatnonzero(np.asarray(self.carry.refused)).tolist()
            if refused:
                return refused
        return []

    def program(self, decoding: bool) -> Any:
        """The compiled loop, of prefill or of decode; other decoders of the same sizes share it."""
        arguments = (self.parameters, self.weights, self.carry, jnp.asarray(False))
        leaves, tree = jax.tree.flatten(arguments)
        return _compiled(self.plan, decoding, tuple((leaf.shape, leaf.dtype) for leaf in leaves), tree)

    def tokens(self, row: int) -> list[int]:
        """The tokens of a row so far."""
        rows = self.carry.rows
        return np.asarray(rows.history)[row, : int(rows.length[row])].tolist()

    def finish(self, rows: Sequence[int]) -> None:
        """Rows end, whether they are done or preempted; what they registered can still be found."""
        padded = np.array([*rows, *[-1] * (self.num_rows - len(rows))], np.int32)
        cache, _ = serving.finish(self.carry.cache, padded)
        state = self.carry.rows
        gone = np.isin(np.arange(self.num_rows), rows)
        state = state._replace(
            **{name: jnp.where(gone, 0, getattr(state, name)) for name in ("length", "target", "ready")}
        )
        self.carry = self.carry._replace(cache=cache, rows=state)

    def serve(self, requests: Sequence[Request]) -> int:
        """Serves all requests, the first ones first; when blocks run out, the last to arrive is preempted and returns.

        Returns:
          How many preemptions it took.

        Raises:
          OperationError: a request that does not fit even alone.
        """
        waiting = collections.deque(requests)
        running: dict[int, Request] = {}
        preempted, held_back = 0, False
        while waiting or running:
            if waiting and not (held_back and running):
                free = [row for row in range(self.num_rows) if row not in running]
                new = {row: waiting.popleft() for row in free[: len(waiting)]}
                self.arrive(new)
                running |= new
            refused = self.run(stop_early=bool(waiting))
            ended = [row for row in running if len(self.tokens(row)) == running[row].target]
            if ended:
                held_back = False
            elif refused:
                if len(running) == 1:
                    raise OperationError("num_blocks", self.config.num_blocks, "room for one request at least")
                ended, held_back = [list(running)[-1]], True
                waiting.appendleft(running[ended[0]])
                preempted += 1
            for row in ended:
                self.collect(row, running.pop(row))
            self.finish(ended)
        return preempted

    def collect(self, row: int, request: Request) -> None:
        """Gives a request the tokens of its row, and the logits if they are kept."""
        request.tokens = self.tokens(row)
        if self.carry.logits.shape[0]:
            new = np.asarray(self.carry.logits[row])
            old = new if request.logits is None else request.logits
            request.logits = np.where(np.isnan(new), old, new)


@functools.cache
def _compiled(plan: Plan, decoding: bool, shapes: tuple[Any, ...], tree: Any) -> Any:
    """`loop.run` compiled for arguments of those shapes and dtypes, what it carries donated."""
    arguments = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    return jax.jit(functools.partial(loop.run, plan, decoding), donate_argnums=2).lower(*arguments).compile()


def forget_programs() -> None:
    """Frees all compiled loops. They hold memory mappings, of which Linux gives a process 65,530."""
    _compiled.cache_clear()
    jax.clear_caches()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _place(
    rows: Rows,
    logits: jax.Array,
    places: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    targets: jax.Array,
    ready: jax.Array,
) -> tuple[Rows, jax.Array]:
    """Puts requests into the rows `places`, -1 for none; their logits are forgotten."""
    place = jnp.where(places < 0, rows.length.shape[0], places)
    values = Rows(tokens, lengths, targets, ready)
    rows = jax.tree.map(lambda old, new: old.at[place].set(new, mode="drop"), rows, values)
    return rows, logits.at[place].set(jnp.nan, mode="drop")
