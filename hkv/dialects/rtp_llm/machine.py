"""A cache under RTP-LLM's rules as a compiled function from state to state.

`run(parameters, state, operations)` performs a whole batch of mixed operations in one dispatch
(`hkv.dialects.rtp_llm.rules.operations`). The state is donated: use the one that is returned.
"""

from __future__ import annotations

import numpy as np

from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.rtp_llm.rules import execute
from hkv.dialects.rtp_llm.rules.operations import ALL, RtpColumn, RtpResults
from hkv.dialects.rtp_llm.rules.parameters import RtpParameters, of_config
from hkv.errors import ConfigError
from hkv.machine.operations import Programs, bucket, check_granted
from hkv.state.pooled import PooledBuckets, PooledState, empty_pooled


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


_PROGRAMS = Programs(execute.execute, only=ALL, ids=0)
run, pure = _PROGRAMS.run, _PROGRAMS.pure
forget_programs, count_programs = _PROGRAMS.forget, _PROGRAMS.count


def check(results: RtpResults) -> None:
    """Debug mode: `hkv.machine.operations.check_granted` of results."""
    statuses = np.asarray(results.table)[:, RtpColumn.STATUS]
    check_granted(statuses, ids=(int(results.count), len(results.ids)))
