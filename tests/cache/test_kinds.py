"""The compiled form of what a query does not need, against the reference's kinds and against its inverse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules import reads
from hkv.dialects.vllm.rules.parameters import GroupField, of_config
from hkv.model.topology import Topology
from hkv.spec import KINDS, LayerSpec, spec_from_log
from reference.dialects.vllm.kinds import all_kinds
from reference.state.pool import Pool

N = jnp.arange(200)


def test_every_kind_of_layer_has_rules() -> None:
    assert set(kinds.all_kinds()) == set(all_kinds()) == set(kinds.names()) == set(KINDS)


@pytest.mark.parametrize("unit", [1, 4, 6, 16])
@pytest.mark.parametrize("lookback", [0, 1, 3, 8, 13, reads.UNLIMITED])
def test_the_last_query_is_the_inverse(unit: int, lookback: int) -> None:
    skipped = reads.skipped_tokens(N, unit, lookback).tolist()
    assert skipped == sorted(skipped)
    for end in (1, 4, 8, 40):
        last = int(reads.last_query(jnp.int32(end), unit, lookback))
        assert [n for n in range(200) if skipped[n] < end] == list(range(min(last + 1, 200)))


def _config(spec: LayerSpec) -> VllmConfig:
    size = spec.block_size
    topology = Topology.of_specs([spec, spec])
    caching = spec.prefix_cacheable and not spec.encoder_tokens
    return VllmConfig(topology=topology, num_blocks=9, hash_block_size=size, scheduler_block_size=size, caching=caching)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("seed", range(20))
def test_what_is_skipped_is_what_the_reference_skips(kind: str, seed: int) -> None:
    choices = RandomChoices(seed)
    spec = spec_from_log(kinds.of_kind(kind).draw(choices, choices.pick((1, 2, 3, 4, 8)), "core", 1))
    config = _config(spec)
    own = all_kinds()[kind](0, spec, config, Pool(config.num_blocks))
    group = np.asarray(of_config(config, 4).groups)[0]
    found = reads.skipped_tokens(N, group[GroupField.UNIT], group[GroupField.LOOKBACK])
    assert found.tolist() == [max(0, own.skipped_tokens(n)) for n in range(200)]
