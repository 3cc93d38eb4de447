"""Context parallelism on arrays beside the host's form."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.dialects.rtp_llm.config import CpSlotMapper
from hkv.dialects.rtp_llm.rules import parameters
from hkv.model.group_policy import CpMapping

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
