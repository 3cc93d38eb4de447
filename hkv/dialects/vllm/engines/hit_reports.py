"""Events of a compiled cache's hits, for requests whose hits are published (vLLM 0.33 `kv_cache_report_mode` `full`).

A lookup changes nothing in the compiled cache; its answer says all that the events do.
"""

from __future__ import annotations

from collections.abc import Iterator

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.jax_reading import Span
from hkv.dialects.vllm.log.structs import Hit
from hkv.errors import EngineFailure

BUG = "hit-reported-by-columns"


def spans_of(hit: Hit, config: VllmConfig, num_keys: int) -> Iterator[Span]:
    """Spans of blocks that a hit consists of, one or two a group; none where nothing was hit.

    Args:
      hit: the answer to the lookup.
      config: configuration of the cache.
      num_keys: prefix keys that the request has.

    Raises:
      EngineFailure: the defect, asked for by name, made the engine fail.
    """
    for group, row in enumerate(hit.blocks if hit.hit else ()):
        if row and BUG in config.bugs:
            yield _columns(group, len(row), config, num_keys)
        elif row:
            yield from _blocks(group, row, hit.hit, config)


def _blocks(group: int, row: list[int], hit: int, config: VllmConfig) -> Iterator[Span]:
    """The whole blocks that are there, and the last hash block of one that the hit ends inside."""
    size, part = config.block_size(group), config.hash_block_size
    whole = hit // size
    ends = [size * (column + 1) for column, block in enumerate(row[:whole]) if block]
    if ends:
        yield Span(group, size, 0, whole * size, ends)
    if hit > whole * size and row[whole]:
        yield Span(group, part, hit - part, hit, [hit])


def _columns(group: int, columns: int, config: VllmConfig, num_keys: int) -> Span:
    """Every column as a whole block of one rank, as vLLM has it."""
    size, part = config.topology.specs[group].block_size, config.hash_block_size
    if size % part:
        raise EngineFailure("block_size", size, f"a multiple of hash blocks of {part} tokens")
    if columns * size > num_keys * part:
        raise EngineFailure("keys", num_keys, f"those of {columns} columns")
    return Span(group, size, 0, columns * size, [size * (column + 1) for column in range(columns)])
