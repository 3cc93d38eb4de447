"""Forms of RTP-LLM's rules beside the reference: capacities, projections for connectors, ranks on arrays."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.config import CpSlotMapper
from hkv.dialects.rtp_llm.monitoring import slots_missing, token_capacity, tokens_of
from hkv.dialects.rtp_llm.rules import parameters
from hkv.dialects.rtp_llm.transfers import project
from hkv.errors import ConfigError
from hkv.model.group_policy import CpMapping
from reference.dialects.rtp_llm.connector_projection import project as project_resource
from reference.dialects.rtp_llm.manager import ALLOCATORS
from reference.dialects.rtp_llm.resource import BatchResource, Resource
from tests.rtp_llm.build import resource, tiny_multi
from tests.rtp_llm.traffic import draw_config

N = -1


def test_counts_that_are_not_one_a_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match="one number for each of 2 pools"):
        tokens_of(tiny_multi(6, 8).config, [5])


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False))
def test_capacities_are_the_references(rng: random.Random) -> None:
    config = draw_config(rng)
    allocator = ALLOCATORS[config.name](config)
    for pool in allocator.pools:
        pool.malloc(rng.randint(0, pool.total))
    free = [pool.free for pool in allocator.pools]
    assert tokens_of(config, free) == allocator.tokens_of("free_blocks")
    assert tokens_of(config, [pool.total for pool in allocator.pools]) == allocator.tokens_of("total")
    assert token_capacity(config) == allocator.token_capacity
    row: BatchResource = resource(allocator)
    slots = [rng.randint(0, 5) for _ in config.policies]
    for blocks, count in zip(row.rows[0].groups, slots, strict=True):
        blocks.assign([N] * count)
    tokens, reserve = rng.randint(1, 60), rng.randint(0, 4)
    assert slots_missing(config, tokens, slots, reserve) == allocator.single_need(row, tokens, reserve)


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False))
def test_projections_are_the_references(rng: random.Random) -> None:
    config = draw_config(rng)
    keys, aligned = list(range(100, 100 + rng.randint(1, 9))), rng.random() < 0.5
    selected = config.mapper.canonical_keys(keys)[: rng.randint(0, 9)]
    source = Resource(config.topology, keys, aligned=aligned)
    for blocks in source.groups:
        blocks.assign([rng.choice([N, block]) for block in range(1, 1 + rng.randint(0, len(keys)))])
    wanted = project_resource(config, source, selected)
    found = project(config, keys, [blocks.blocks for blocks in source.groups], selected, aligned=aligned)
    assert found == (list(wanted.keys), wanted.aligned, [blocks.blocks for blocks in wanted.groups])


MAPPED = jax.jit(
    lambda tokens, size, ranks, dealt: (
        parameters.local_blocks(tokens, size, ranks),
        parameters.effective_tokens(tokens, size, ranks, dealt),
        parameters.owner(tokens, ranks),
        parameters.canonical_place(tokens, ranks),
    )
)


@settings(max_examples=50)
@given(size=st.integers(1, 300), ranks=st.integers(1, 9), mapping=st.sampled_from(CpMapping), start=st.integers(0, 999))
def test_arrays_are_mapped_as_numbers_are(size: int, ranks: int, mapping: CpMapping, start: int) -> None:
    mapper = CpSlotMapper(0, ranks, size)
    tokens = np.arange(start, start + 32, dtype=np.int32)
    dealt = mapping is CpMapping.BLOCK_ROUND_ROBIN
    local, effective, (rank, slot), place = MAPPED(tokens, np.int32(size), np.int32(ranks), np.bool_(dealt))
    assert local.tolist() == [mapper.local_blocks(number) for number in tokens.tolist()]
    if mapper.sharded:
        assert effective.tolist() == [mapper.effective_tokens(number, mapping) for number in tokens.tolist()]
    assert list(zip(rank.tolist(), slot.tolist(), strict=True)) == [mapper.owner(number) for number in tokens.tolist()]
    keys = list(range(100))
    whole = [keys[index] for index in place.tolist() if index < len(keys)]
    assert whole == mapper.canonical_keys(keys)[start : start + 32]
