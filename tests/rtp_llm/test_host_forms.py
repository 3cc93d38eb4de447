"""Forms of RTP-LLM's rules beside the reference: capacities, and ranks on arrays."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.config import CpSlotMapper
from hkv.dialects.rtp_llm.monitoring import token_capacity, tokens_of
from hkv.dialects.rtp_llm.rules import parameters
from hkv.errors import ConfigError
from hkv.model.group_policy import CpMapping
from reference.dialects.rtp_llm.manager import ALLOCATORS
from tests.rtp_llm.build import tiny_multi
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
