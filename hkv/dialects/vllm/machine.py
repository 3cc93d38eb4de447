"""A cache under vLLM's rules as a compiled function from state to state.

`run(parameters, state, operations)` performs a whole batch of mixed operations (`hkv.dialects.vllm.rules.operations`)
in one dispatch. The state is donated: use the one that is returned. Results and events are outputs, never state.
"""

from __future__ import annotations

import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules import execute
from hkv.dialects.vllm.rules.operations import Code, Column, Results
from hkv.dialects.vllm.rules.parameters import Parameters, of_config
from hkv.machine.operations import Programs, bucket, check_granted, nearest
from hkv.state.state import Buckets, State, empty

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


_PROGRAMS = Programs(execute.execute, only=ALL, ids=0, events=0)
run, pure = _PROGRAMS.run, _PROGRAMS.pure
forget_programs, count_programs = _PROGRAMS.forget, _PROGRAMS.count


def check(results: Results) -> None:
    """Debug mode: `hkv.machine.operations.check_granted` of results."""
    count, events = (int(each) for each in np.asarray(results.counts))
    statuses = np.asarray(results.table)[:, Column.STATUS]
    check_granted(statuses, ids=(count, len(results.ids)), events=(events, len(results.events)))
