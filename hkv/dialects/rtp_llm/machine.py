"""The verbs of a cache under RTP-LLM's rules: pure functions from state to state, compiled.

`run(parameters, state, operations)` performs a whole batch of mixed operations in one dispatch
(`hkv.dialects.rtp_llm.rules.operations`). The state is donated: use the one that is returned.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.rules import execute
from hkv.dialects.rtp_llm.rules.operations import ALL, RtpCode, RtpColumn, RtpResults
from hkv.dialects.rtp_llm.rules.parameters import RtpParameters, of_config
from hkv.errors import ConfigError, OperationError
from hkv.machine.operations import Operations, Programs, bucket
from hkv.state.pooled import PooledBuckets, PooledState, empty_pooled
from hkv.state.status import Status


def init(config: RtpConfig, buckets: PooledBuckets) -> tuple[RtpParameters, PooledState]:
    """An empty cache, as NumPy arrays.

    Args:
      config: the configuration, which becomes data.
      buckets: the static sizes; see `buckets_for`.

    Raises:
      ConfigError: it does not fit the buckets, or they have a tree and it has none.
    """
    names = names_of(config)
    if buckets.names < names or (not names and buckets.names):
        raise ConfigError("names", buckets.names, f"{names}: a node for each namespace of the prefix tree")
    return of_config(config, buckets.groups), empty_pooled(buckets, config.num_blocks)


def buckets_for(
    config: RtpConfig, *, tokens: int, requests: int = 16, sequences: int = 4, keys: int = 4096
) -> PooledBuckets:
    """Static sizes that a configuration fits, rounded up so that few executables serve many configurations.

    Args:
      config: the configuration.
      tokens: longest sequence, its reserve included.
      requests: requests at the same time.
      sequences: sequences of a request.
      keys: distinct keys.
    """
    smallest = min([config.block_size, *(group.spec.block_size for group in config.topology.groups)])
    groups = bucket(len(config.policies), 8)
    return PooledBuckets(
        blocks=bucket(max(config.num_blocks), 1024),
        groups=groups,
        pools=groups,
        requests=bucket(requests, 4),
        sequences=bucket(sequences, 4),
        row=bucket(-(-tokens // smallest) + 2, 128),
        chain=bucket(-(-tokens // config.block_size) + 2, 128),
        keys=bucket(keys, 1024),
        names=2 * config.prefix_tree,
    )


def names_of(config: RtpConfig) -> int:
    """Nodes that each key has in the prefix tree, 0 for no tree; under context parallelism keys have two names."""
    return (1 + (config.cp_size > 1)) * config.prefix_tree


def run(
    parameters: RtpParameters,
    state: PooledState,
    operations: Operations,
    *,
    ids: int = 0,
    only: tuple[RtpCode, ...] = ALL,
) -> tuple[PooledState, RtpResults]:
    """Performs operations in order, in one dispatch.

    Args:
      parameters: the configuration.
      state: the cache; donated.
      operations: the operations.
      ids: room for ids in the results; 0: none are reported, and nothing is compiled for them.
      only: codes that the program is to know; others answer `Status.UNKNOWN_OPERATION`.

    Returns:
      The new state, and the results.
    """
    return _PROGRAMS.jitted(only=tuple(only), ids=ids)(parameters, state, operations)


def pure(ids: int = 0, only: tuple[RtpCode, ...] = ALL) -> Callable[..., tuple[PooledState, RtpResults]]:
    """`run` as a function to use inside compiled functions, or to `vmap` over stacked states. It is not jitted."""
    return _PROGRAMS.batchable(only=tuple(only), ids=ids)


def forget_programs() -> None:
    """Forgets every compiled `run`: the next one is traced and compiled anew."""
    _PROGRAMS.forget()


def count_programs() -> int:
    """Number of times that `run` was compiled since `forget_programs`."""
    return _PROGRAMS.count()


_PROGRAMS = Programs(execute.execute)


def check(results: RtpResults) -> None:
    """Debug mode: raises for the first operation that was refused, and when output was cut off.

    Raises:
      OperationError: names the operation's place in the batch and its status.
    """
    for place, status in enumerate(np.asarray(results.table)[:, RtpColumn.STATUS]):
        if status != Status.OK:
            raise OperationError(f"operations[{place}]", Status(int(status)).name, "an operation that is granted")
    room = len(results.ids)
    if room and int(results.count) > room:
        raise OperationError("ids", room, f"room for {int(results.count)}")


__all__ = ["ALL", "buckets_for", "check", "count_programs", "forget_programs", "init", "pure", "run"]
