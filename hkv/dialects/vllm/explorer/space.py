"""State space to explore: a small configuration, the requests and their lengths, and the operations they may see."""

from __future__ import annotations

import dataclasses

import numpy as np

from hkv.contract import explore_command
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.invariants.content import registrable
from hkv.dialects.vllm.traffic.hit_comparison import Cause, causes
from hkv.errors import ConfigError
from hkv.state.state import Buckets
from reference.hits import hit_alignment

MOVES = {
    "cold": "admissions that adopt nothing of what is cached",
    "parts": "allocations for a part of the tokens that are left",
    "delay": "allocations that register nothing, and the commit that does so later",
    "evict": "single blocks that lose their keys",
    "reset": "resets of the prefix cache",
    "drop": "waiting requests that are forgotten, so that others can arrive in their place",
}
"""Operations that can be left out, by name. Arrivals, lookups, admissions, growth and the end of a request cannot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """All that can happen to a small cache. Lengths are in tokens; there are two different tokens, 0 and 1.

    Attributes:
      config: the cache; `max_model_len` is the longest request.
      requests: requests at the same time.
      prompt: longest prompt; every string of that many tokens or fewer arrives.
      without: names of `MOVES` that are left out.

    Raises:
      ConfigError: something is too large, or asks for a rule that no judge here knows.
    """

    config: VllmConfig
    requests: int = 2
    prompt: int = 2
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        config = self.config
        explore_command.check_small("num_blocks", config.num_blocks)
        explore_command.Space(requests=self.requests, prompt=self.prompt, max_model_len=config.max_model_len)
        if unknown := sorted(self.without - MOVES.keys()):
            raise ConfigError("without", unknown[0], f"one of {', '.join(MOVES)}")
        for name, plain in {
            "caching": True,
            "hash_lookahead": 0,
            "partial_hits": False,
            "shared_prefix_checkpoint": False,
            "context_parallel": 1,
        }.items():
            if getattr(config, name) != plain:
                raise ConfigError(name, getattr(config, name), f"{plain}: the explorer judges nothing else yet")
        for index, spec in enumerate(config.topology.specs):
            scratch = spec.scratch_blocks or kinds.layer(spec).checkpoint_blocks
            if scratch:
                raise ConfigError(f"groups[{index}]", spec, "no speculative and no checkpoint blocks")
            if spec.snapshot and spec.block_size != config.hash_block_size:
                expected = f"hash_block_size {config.hash_block_size}, so that no state is copied"
                raise ConfigError(f"groups[{index}].block_size", spec.block_size, expected)

    @property
    def buckets(self) -> Buckets:
        """The smallest static sizes that hold the space. A prefix key is the token string itself (`code_of`)."""
        config = self.config
        sizes = config.block_sizes
        return Buckets(
            blocks=config.num_blocks,
            requests=self.requests,
            groups=1 << len(sizes).bit_length(),
            row=max(-(-config.max_model_len // size) for size in sizes),
            chain=max(1, config.max_model_len // config.hash_block_size),
            keys=2 << config.max_model_len,
            parts=max(size // config.hash_block_size for size in sizes) - 1,
        )


def code_of(tokens: tuple[int, ...]) -> int:
    """A token string as a number: a leading 1, then a bit a token. The empty string is 1; 0 is no string."""
    code = 1
    for token in tokens:
        code = 2 * code + token
    return code


def tokens_of(code: int) -> list[int]:
    """The tokens of a string's number."""
    return [int(bit) for bit in f"{code:b}"[1:]]


# Promises of a configuration as small tables: what is read at each length, and which entries prove a hit.
#
# Made on the host from `LayerSpec.reads`, never from a rule under test.

FAR = 1 << 20
"""More tokens than any request has."""


@dataclasses.dataclass(frozen=True)
class Definitions:
    """Tables over L = `max_model_len` tokens, G groups and W columns of a row.

    Attributes:
      sizes: int32[G], tokens in a block.
      opaque, snapshot: bool[G]: one block a request; blocks hold states.
      whole: bool[G, W], columns whose tokens every later query reads.
      off_grid: bool[G], chunks that do not start at blocks.
      outgrown: bool[G, L + 1, W], columns that are not needed any more when so many tokens are processed.
      needed: bool[L + 1, G, W, L + 1], whether a hit of so many tokens needs a column to hold so many tokens.
      proofs: bool[L + 1, P, G, L + 1], sets of entries of which one is wanted, P sets for a hit of so many tokens.
      proven: bool[L + 1, P], which of those sets count.
      aligned: bool[L + 1], lengths that a hit may have.
      may_be_less, may_be_more: bool[L + 1], requests of so many tokens whose hit may be shorter or longer than defined
        (`hkv.dialects.vllm.traffic.hit_comparison`).
      watermark: blocks that stay free when a request is admitted next to others.
      registrable: int32[G, L + 1], how many of so many computed tokens may get keys.
      family: bool[G], groups whose blocks all get keys as soon as they are full.
      dense: whether nothing is left out on purpose.
    """

    sizes: np.ndarray
    opaque: np.ndarray
    whole: np.ndarray
    snapshot: np.ndarray
    off_grid: np.ndarray
    outgrown: np.ndarray
    needed: np.ndarray
    proofs: np.ndarray
    proven: np.ndarray
    aligned: np.ndarray
    may_be_less: np.ndarray
    may_be_more: np.ndarray
    watermark: int
    registrable: np.ndarray
    family: np.ndarray
    dense: bool


def definitions(space: Space) -> Definitions:
    """The tables of a space."""
    config, width = space.config, space.buckets.row
    specs, longest = config.topology.specs, config.max_model_len
    sizes = np.array(config.block_sizes, np.int32)
    lengths = range(longest + 1)
    outgrown = np.zeros((len(specs), longest + 1, width), bool)
    needed = np.zeros((longest + 1, len(specs), width, longest + 1), bool)
    whole = np.zeros((len(specs), width), bool)
    off_grid = np.array([kinds.layer(spec).off_grid for spec in specs])
    for group, spec in enumerate(specs):
        never = kinds.layer(spec).retired(FAR, int(sizes[group]))
        whole[group] = [spec.prefix_cacheable and column not in never for column in range(width)]
        for n in lengths:
            columns = kinds.layer(spec).retired(n, int(sizes[group]))
            outgrown[group, n, columns.start : columns.stop] = True
            if spec.prefix_cacheable and not off_grid[group]:
                for column in {position // sizes[group] for positions in spec.reads(n) for position in positions}:
                    needed[n, group, column, min(n, (column + 1) * sizes[group])] = True
    proofs = [_proof(space, n) for n in lengths]
    most = max(map(len, proofs))
    table = np.zeros((longest + 1, most, len(specs), longest + 1), bool)
    proven = np.zeros((longest + 1, most), bool)
    for n, sets in enumerate(proofs):
        for number, entries in enumerate(sets):
            proven[n, number] = True
            for group, end in entries:
                table[n, number, group, end] = True
    named = [causes(config, n) for n in lengths]
    return Definitions(
        sizes=sizes,
        opaque=np.array([spec.one_block for spec in specs]),
        whole=whole,
        snapshot=np.array([spec.snapshot for spec in specs]),
        off_grid=off_grid,
        outgrown=outgrown,
        needed=needed,
        proofs=table,
        proven=proven,
        aligned=np.array([n % hit_alignment(config) == 0 for n in lengths]),
        may_be_less=np.array([any(cause.direction == "less" for cause in found) for found in named]),
        may_be_more=np.array([bool(found & {Cause.DROP_NOT_REPEATED, Cause.CHUNK_OFF_GRID}) for found in named]),
        watermark=config.watermark_blocks,
        registrable=np.array([[registrable(config, g, n) for n in lengths] for g in range(len(specs))], np.int32),
        family=np.array([spec.reads_all for spec in specs]),
        dense=config.retention_interval is None,
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
