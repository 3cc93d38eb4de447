"""A configuration as data: two small arrays that every compiled rule reads, so that configurations share
executables."""

from __future__ import annotations

import dataclasses
import enum

import jax
import numpy as np

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig, eagle_groups, finder_groups, keeps_shared_boundaries
from hkv.dialects.vllm.rules.reads import UNLIMITED
from hkv.errors import ConfigError
from hkv.pytrees import pytree
from hkv.state.flat_arrays import ParameterView
from hkv.state.loops import Scalar

CacheField = enum.IntEnum(
    "CacheField",
    (
        "GROUPS",
        "NUM_BLOCKS",
        "CACHING",
        "HASH_BLOCK",
        "ALIGNMENT",
        "LOOKAHEAD",
        "MAX_MODEL_LEN",
        "REPREFILLABLE",
        "UNITARY",
        "SINGLE_PASS",
        "FINDERS",
        "WATERMARK",
        "LEAST_BLOCK",
        "EXTERNAL_NOT_COUNTED",
        "NEGATIVE_ESTIMATE",
        "SNAPSHOTS",
        "DROPS",
        "TAIL_OUTLIVES",
        "RETAINED",
        "SCHEDULER_BLOCK",
        "FINDER_ERROR",
        "REGISTRATION_ALIGNMENT",
        "SHARED_BOUNDARIES",
        "BELOW_SHARED_BOUNDARIES",
        "TAILS_AGAIN",
        "MOST_SCRATCH",
        "SILENT",
    ),
    start=0,
)
"""Columns of `Parameters.cache`: what belongs to no group. Lengths are in tokens, `NUM_BLOCKS` and `WATERMARK` in
blocks. ALIGNMENT: to what hits are aligned. REGISTRATION_ALIGNMENT: to what registered lengths are. RETAINED: to what
retained lengths are, 0 where retention is dense. SHARED_BOUNDARIES: whether states are kept where others were seen to
branch off. BELOW_SHARED_BOUNDARIES, TAILS_AGAIN: `VllmConfig.retains_below_shared_boundaries` and
`registers_tails_again`. MOST_SCRATCH: most blocks of scratch in a row. SILENT: whether nothing need be noted of blocks
that are not registered, which only the reasons of misses ask for."""

GroupField = enum.IntEnum(
    "GroupField",
    (
        "UNIT",
        "BLOCK",
        "SCALE",
        "LOOKBACK",
        "NEED",
        "EAGLE",
        "CAP",
        "COLUMN",
        "CACHEABLE",
        "STEPS",
        "TAIL",
        "FINE",
        "PERIOD",
        "KEEP",
        "SHIFT",
        "SCRATCH",
        "EXPORT_UNIT",
        "EXPORT_STEP",
        "EXPORT_LAST",
        "EXPORT_FAILS",
        "FINDER_FIRST",
        "FINDER_COUNT",
        "MEMBER",
        "WAITS",
        "ONCE",
        "BACKWARD",
        "RECURRENT",
        "ONE_BLOCK",
        "SINKS",
        "STATES",
        "ENCODER",
        "HALVINGS",
    ),
    start=0,
)
"""Columns of `Parameters.groups`.

BLOCK: tokens in a manager block. SCALE: hash blocks in it. UNIT and LOOKBACK, in tokens, and HALVINGS say what a query
needs (`hkv.dialects.vllm.rules.reads`). NEED: blocks in a run to resume behind, -1 where none is needed anywhere.
EAGLE: whether a hit drops a block. CAP: most blocks admission counts. COLUMN: the group's column in the key table.
CACHEABLE: whether it is ever hit. STEPS: manager blocks between two lengths that a hit may have. TAIL: whether the
prompt's tail is registered (1: in a block that goes on to be filled, 2: as a snapshot). FINE: whether hits may end
inside a block. PERIOD, KEEP and SHIFT: of every PERIOD blocks, counted from SHIFT on, the last KEEP are registered;
PERIOD 0: all. With sparse retention, so are the last KEEP before some lengths (`hkv.dialects.vllm.rules.retire`).
SCRATCH: blocks for drafts at a row's end. EXPORT_STEP: tokens; at which distances from its start a chunk can leave a
state behind, 0: at none. EXPORT_UNIT: tokens, to which the lengths of such states are aligned. EXPORT_LAST: whether
only a prompt's last chunk leaves one. EXPORT_FAILS: defects that such states are to have
(`hkv.dialects.vllm.rules.export`). WAITS: whether a hit that ends inside a block waits until the block is written so
far. ONCE: whether a lookup need not be repeated, as a prefix of a hit is a hit too. BACKWARD: whether a lookup goes
from the end to the left, for a run. RECURRENT: whether columns are states by position. ONE_BLOCK: whether a request has
one block for its whole life. SINKS: blocks at a row's beginning that every query reads; only where there are some, a
row may be null after entries that are not. STATES: whether a block holds a state that a step reads and writes as a
whole. ENCODER: whether blocks hold an encoder's output, and no token of the request.

FINDER_FIRST, FINDER_COUNT and MEMBER do not belong to the group of that row. Row j, FINDER_FIRST and FINDER_COUNT:
first column and number of the groups that are looked up together, as the j-th. Row c, MEMBER: the group whose column
is c.
"""

READ_FIELDS = (GroupField.UNIT, GroupField.LOOKBACK, GroupField.HALVINGS)
"""Columns that define what a query reads, in the order in which `hkv.dialects.vllm.rules.reads` takes it."""

FIELDS = 32
"""Columns of both arrays."""


@pytree()
@dataclasses.dataclass(frozen=True)
class Parameters:
    """A configuration as traced data.

    Attributes:
      cache: int32[32], one value for each `CacheField`.
      groups: int32[groups, 32], one row a group, one column for each `GroupField`; rows beyond the groups are 0.
    """

    cache: jax.Array
    groups: jax.Array


class View(ParameterView):
    """A lane of `Parameters`, read field by field."""

    FIELDS = FIELDS

    @property
    def num_groups(self) -> Scalar:
        """Number of groups."""
        return self.whole(CacheField.GROUPS)


def of_config(config: VllmConfig, groups: int) -> Parameters:
    """A configuration as NumPy arrays, with room for so many groups.

    Raises ConfigError for a feature that the compiled cache does not have, or more groups than the bucket.
    """
    specs = config.topology.specs
    if len(specs) >= groups:
        raise ConfigError("groups", len(specs), f"fewer than the bucket's {groups}")
    table = np.zeros((groups, FIELDS), np.int32)
    finders = finder_groups(config)
    # Groups that are looked up together get adjacent columns of the key table: their keys share a cache line.
    order = [group for members in finders for group in members]
    order += [group for group in range(len(specs)) if group not in order]
    unitary = config.caching and len(specs) == 1
    alignment = config.block_size(0) if unitary else config.hit_alignment
    eagle = eagle_groups(config, finders)
    for group, spec in enumerate(specs):
        block = config.block_size(group)
        values = {
            # Defaults of a kind without more to say: it reads everything before the query. What differs, its module
            # says.
            "UNIT": 1,
            "LOOKBACK": UNLIMITED,
            "ONCE": spec.reads_all,
            "BACKWARD": kinds.layer(spec).seeks_run or spec.snapshot,
            "RECURRENT": spec.keeps_states,
            "ONE_BLOCK": spec.one_block,
            "SINKS": -(-spec.sinks // block),
            "STATES": spec.snapshot or spec.one_block,
            "ENCODER": spec.encoder_tokens > 0,
            "BLOCK": block,
            "SCALE": max(1, block // config.hash_block_size),
            "EAGLE": group in eagle,
            "CAP": UNLIMITED,
            "COLUMN": order.index(group),
            "CACHEABLE": config.caching and spec.prefix_cacheable,
            "STEPS": max(1, alignment // block),
            # Last, so that a kind overrides what follows from flags.
            **kinds.module(spec).parameters(config, group, spec, group in eagle),
        }
        for name, value in values.items():
            table[group, GroupField[name]] = value
    for column, group in enumerate(order):
        table[column, GroupField.MEMBER] = group
    first = 0
    for j, members in enumerate(finders):
        table[j, GroupField.FINDER_FIRST], table[j, GroupField.FINDER_COUNT] = first, len(members)
        first += len(members)
    cache = np.zeros(FIELDS, np.int32)
    full_first = bool(finders) and specs[finders[0][0]].reads_all
    for name, value in {
        "GROUPS": len(specs),
        "NUM_BLOCKS": config.num_blocks,
        "CACHING": config.caching,
        "HASH_BLOCK": config.hash_block_size,
        "ALIGNMENT": alignment,
        "LOOKAHEAD": config.hash_lookahead,
        "MAX_MODEL_LEN": config.max_model_len,
        "REPREFILLABLE": max(0, config.prefill_lookahead - 1),
        "UNITARY": unitary,
        "SINGLE_PASS": unitary or (len(finders) == 2 and full_first),
        "FINDERS": len(finders),
        "WATERMARK": config.watermark_blocks,
        "EXTERNAL_NOT_COUNTED": "external-state-not-counted" in config.bugs,
        "DROPS": config.eagle,
        "REGISTRATION_ALIGNMENT": 1 if config.partial_hits else config.scheduler_block_size,
        "SHARED_BOUNDARIES": keeps_shared_boundaries(config),
        "BELOW_SHARED_BOUNDARIES": config.retains_below_shared_boundaries,
        "TAILS_AGAIN": config.registers_tails_again,
        "MOST_SCRATCH": table[:, GroupField.SCRATCH].max(),
        "TAIL_OUTLIVES": "tail-key-outlives-state" in config.bugs,
        "SNAPSHOTS": any(spec.snapshot for spec in specs),
        "NEGATIVE_ESTIMATE": "negative-estimate" in config.bugs,
        "RETAINED": 0 if config.retention_interval is None else config.hit_alignment,
        "SCHEDULER_BLOCK": config.scheduler_block_size,
        "FINDER_ERROR": "finder-index-error" in config.bugs,
        "LEAST_BLOCK": min(
            (config.block_size(g) for g, spec in enumerate(specs) if not spec.one_block), default=UNLIMITED
        ),
    }.items():
        cache[CacheField[name]] = value
    return Parameters(cache=cache, groups=table)  # type: ignore[arg-type]
