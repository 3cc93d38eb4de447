"""Promises of a configuration as small tables: what is read at each length, and which entries prove a hit.

Made on the host from `LayerSpec.reads`, never from a rule under test.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hkv.dialects.vllm.explorer.space import Space
from hkv.dialects.vllm.invariants import arrays
from hkv.dialects.vllm.traffic.hit_causes import Cause, causes
from reference.hits import hit_alignment


@dataclasses.dataclass(frozen=True)
class Definitions:
    """Tables over L = `max_model_len` tokens, G groups and W columns of a row.

    Attributes:
      outgrown, unread: bool[L + 1, G, W], columns that are not needed, or not read, any more when so many tokens are
        processed.
      needed: bool[L + 1, G, W], columns that a hit of so many tokens needs.
      proofs: bool[L + 1, P, G, L + 1], sets of entries of which one is wanted, P sets for a hit of so many tokens.
      proven: bool[L + 1, P], which of those sets count.
      aligned: bool[L + 1], lengths that a hit may have.
      may_be_less, may_be_more: bool[L + 1], requests of so many tokens whose hit may be shorter or longer than defined
        (`hkv.dialects.vllm.traffic.hit_causes`).
      registrable: int32[G, L + 1], how many of so many computed tokens may get keys.
    """

    outgrown: np.ndarray
    unread: np.ndarray
    needed: np.ndarray
    proofs: np.ndarray
    proven: np.ndarray
    aligned: np.ndarray
    may_be_less: np.ndarray
    may_be_more: np.ndarray
    registrable: np.ndarray


def definitions(space: Space) -> Definitions:
    """The tables of a space."""
    config, width = space.config, space.buckets.row
    groups, longest = len(config.topology.specs), config.max_model_len
    lengths = range(longest + 1)
    proofs = [_proof(space, n) for n in lengths]
    most = max(map(len, proofs))
    table = np.zeros((longest + 1, most, groups, longest + 1), bool)
    proven = np.zeros((longest + 1, most), bool)
    for n, sets in enumerate(proofs):
        for number, entries in enumerate(sets):
            proven[n, number] = True
            for group, end in entries:
                table[n, number, group, end] = True
    named = [causes(config, n) for n in lengths]
    return Definitions(
        outgrown=np.array([arrays.outgrown(config, n, width) for n in lengths]),
        unread=np.array([arrays.outgrown(config, n, width, kept=False) for n in lengths]),
        needed=np.array([arrays.read(config, n, width) for n in lengths]),
        proofs=table,
        proven=proven,
        aligned=np.array([n % hit_alignment(config) == 0 for n in lengths]),
        may_be_less=np.array([any(cause.direction == "less" for cause in found) for found in named]),
        may_be_more=np.array([bool(found & {Cause.DROP_NOT_REPEATED, Cause.CHUNK_OFF_GRID}) for found in named]),
        registrable=np.array([[arrays.registrable(config, g, n) for n in lengths] for g in range(groups)], np.int32),
    )


def _proof(space: Space, length: int) -> list[set[tuple[int, int]]]:
    """Condition for every group to resume at a length, as `reference.hits` defines it: one entry of each set of
    `(group, end)` is there."""
    config, sets = space.config, []
    for group, spec in enumerate(config.topology.specs):
        size = config.block_size(group)
        if not spec.prefix_cacheable:
            continue
        if spec.snapshot:
            sets += [{(group, position + 1)} for positions in spec.reads(length) for position in positions]
            continue
        for positions in spec.reads(length):
            sets += _held(group, size, positions)
        if length and group in config.eagle_group_ids:
            sets += _held(group, size, range(length, length + min(size, hit_alignment(config))))
    longest = config.max_model_len
    return [{(group, end) for group, end in entries if end <= longest} for entries in sets]


def _held(group: int, size: int, positions: range) -> list[set[tuple[int, int]]]:
    """Sets of entries, one for each block that `positions` meet, that cover those of them that lie in it."""
    blocks = sorted({position // size for position in positions})
    starts = [min((block + 1) * size, positions.stop) for block in blocks]
    return [
        {(group, end) for end in range(start, (block + 1) * size + 1)}
        for block, start in zip(blocks, starts, strict=True)
    ]
