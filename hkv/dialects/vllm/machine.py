"""The verbs of a cache: pure functions from state to state, compiled.

Every verb is `run` with the one operation: `run(parameters, state, operations)` performs a whole batch of mixed
operations in one dispatch. The state is donated: use the one that is returned. Results and events are outputs, never
state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules import execute
from hkv.dialects.vllm.rules.operations import RESULT_FRONT, Argument, Code, Column, Results
from hkv.dialects.vllm.rules.parameters import Parameters, of_config
from hkv.errors import OperationError
from hkv.machine.operations import WIDTH, Operations, Programs, bucket, nearest
from hkv.state.state import Buckets, State, empty
from hkv.state.status import Status

ALL = tuple(code for code in Code if code != Code.END)
"""Every operation."""


def init(config: VllmConfig, buckets: Buckets) -> tuple[Parameters, State]:
    """An empty cache, as NumPy arrays.

    Args:
      config: the configuration, which becomes data.
      buckets: the static sizes; see `buckets_for`.

    Raises:
      ConfigError: the configuration does not fit the buckets, or needs what the compiled cache does not have.
    """
    return of_config(config, buckets.groups), empty(buckets, config.num_blocks)


def inner_keys(config: VllmConfig) -> int:
    """Most keys that end inside a block, before its own; 0 where nothing is cached."""
    return max((size // config.hash_block_size for size in config.block_sizes), default=1) - 1 if config.caching else 0


def buckets_for(config: VllmConfig, *, requests: int = 32, keys: int = 4096, tokens: int | None = None) -> Buckets:
    """Static sizes that a configuration fits, rounded up so that few executables serve many configurations.

    Small caches get more than they need, so that nearly all of them have the same sizes.

    Args:
      config: the configuration.
      requests: requests at the same time.
      keys: distinct prefix keys.
      tokens: longest request; `max_model_len` by default.
    """
    tokens = config.max_model_len if tokens is None else min(tokens, config.max_model_len)
    longest = max(tokens, config.encoder_tokens)
    sizes = config.block_sizes or (config.hash_block_size,)
    small = config.num_blocks <= SMALL
    scratch = max((spec.scratch_blocks for spec in config.topology.specs), default=0)
    row = max(-(-longest // size) for size in sizes) + 2 + scratch
    parts = inner_keys(config)
    groups, chain = max(8 if small else 4, 1 << len(sizes).bit_length()), -(-tokens // config.hash_block_size) + 2
    large = bucket(requests, 8) * groups * bucket(row, 512) > MOST_ENTRIES
    size = nearest if large else bucket
    return Buckets(
        blocks=bucket(config.num_blocks, 256),
        requests=size(requests, 8),
        groups=groups,
        row=size(row, 512),
        chain=size(chain, 512),
        keys=bucket(keys, 1024),
        parts=size(parts + 1, 16 if small else 8) - 1 if parts or small else 0,
    )


SMALL = 1024
"""Blocks of a pool that counts as small."""

MOST_ENTRIES = 1 << 27
"""Entries of all rows from which on requests and rows are rounded up by little: half a gibibyte."""


def run(
    parameters: Parameters,
    state: State,
    operations: Operations,
    *,
    ids: int = 0,
    events: int = 0,
    only: tuple[Code, ...] = ALL,
) -> tuple[State, Results]:
    """Performs operations in order, in one dispatch.

    Args:
      parameters: the configuration.
      state: the cache; donated.
      operations: the operations.
      ids: room for block ids in the results; 0: none are reported, and nothing is compiled for them.
      events: room for events in the results; 0 likewise.
      only: codes that the program is to know; others answer `Status.UNKNOWN_OPERATION`.

    Returns:
      The new state, and the results.
    """
    return _PROGRAMS.jitted(only=tuple(only), ids=ids, events=events)(parameters, state, operations)


def pure(ids: int = 0, events: int = 0, only: tuple[Code, ...] = ALL) -> Callable[..., tuple[State, Results]]:
    """`run` as a function to use inside compiled functions, or to `vmap` over stacked states. It is not jitted."""
    return _PROGRAMS.batchable(only=tuple(only), ids=ids, events=events)


def forget_programs() -> None:
    """Forgets every compiled `run`: the next one is traced and compiled anew."""
    _PROGRAMS.forget()


def count_programs() -> int:
    """Number of times that `run` was compiled since `forget_programs`."""
    return _PROGRAMS.count()


_PROGRAMS = Programs(execute.execute)


def _verb(code: Code, doc: str) -> Callable[..., tuple[State, Results]]:
    def program(parameters: Parameters, state: State, slot: Any, payload: Any, **arguments: Any) -> Any:
        row = jnp.zeros(WIDTH, jnp.int32)
        values = {"code": int(code), "slot": slot, "keys": payload.shape[0], **arguments}
        for name, value in values.items():
            row = row.at[Argument[name.upper()]].set(value)
        table = jnp.stack([row, jnp.zeros(WIDTH, jnp.int32)])
        padded = jnp.concatenate([payload, jnp.zeros(1, jnp.int32)])
        return _PROGRAMS.batchable(only=(code,), ids=0, events=0)(parameters, state, Operations(table, padded))

    jitted = jax.jit(program, donate_argnums=(1,))

    def verb(
        parameters: Parameters, state: State, slot: Any = 0, payload: Any = None, **arguments: Any
    ) -> tuple[State, Results]:
        unknown = sorted(set(arguments) - {name.lower() for name in Argument.__members__})
        if unknown:
            raise OperationError(unknown[0], arguments[unknown[0]], f"an argument of {code.name.lower()}")
        numbers = np.zeros(0, np.int32) if payload is None else payload
        return jitted(parameters, state, _number(slot), numbers, **{k: _number(v) for k, v in arguments.items()})

    verb.__doc__ = doc
    verb.__name__ = code.name.lower()
    verb.jitted = jitted  # type: ignore[attr-defined]
    return verb


def _number(value: Any) -> Any:
    return np.int32(value) if isinstance(value, int) else value


request = _verb(Code.REQUEST, "A request arrives: `tokens` in its prompt, `payload` its prefix keys.")
append = _verb(Code.APPEND, "`tokens` generated tokens are added, `payload` the prefix keys that they complete.")
lookup = _verb(Code.LOOKUP, "The longest hit of a waiting request.")
allocate = _verb(
    Code.ALLOCATE,
    "A request gets blocks for its next tokens; arguments as `hkv.dialects.vllm.rules.operations.Argument` says.",
)
advance = _verb(Code.ADVANCE, "`tokens` more tokens are computed.")
commit = _verb(Code.COMMIT, "Registers the blocks that the first `tokens` tokens fill.")
retire = _verb(Code.RETIRE, "Gives back the blocks that the query at `tokens` cannot read.")
free = _verb(Code.FREE, "A running request gives its blocks back and waits.")
drop = _verb(Code.DROP, "A waiting request is forgotten.")
copies = _verb(Code.COPIES, "Copies are made: the blocks in `payload` give back the references that these held.")
computed = _verb(Code.COMPUTED, "`tokens` tokens are computed in all.")
pop = _verb(Code.POP, "A running request waits again without its blocks, which keep their references.")
found = _verb(
    Code.FOUND, "A hit of `tokens` tokens is to be adopted: `payload` is, for each group, a count and so many blocks."
)
step = _verb(Code.STEP, "A new scheduling step begins.")
evict = _verb(Code.EVICT, "The blocks in `payload` lose their keys.")
reset = _verb(Code.RESET, "All blocks lose their keys, unless one is in use.")
fork = _verb(
    Code.FORK,
    "A request is started in the empty slot `tokens` from the one in `slot`; the results name the copies to make.",
)


def check(results: Results) -> None:
    """Debug mode: raises for the first operation that was refused, or that dropped ids, and when output was cut off.

    Raises:
      OperationError: names the operation's place in the batch and its status.
    """
    table = np.asarray(results.table)
    for place, status in enumerate(table[:, Column.STATUS]):
        if status != Status.OK:
            raise OperationError(f"operations[{place}]", Status(int(status)).name, "an operation that is granted")
    for name, count, room in zip(
        ("ids", "events"), np.asarray(results.counts), (len(results.ids), len(results.events)), strict=True
    ):
        if room and count > room:
            raise OperationError(name, room, f"room for {count}")


__all__ = ["ALL", "RESULT_FRONT", "buckets_for", "check", "init", "pure", "run"]
