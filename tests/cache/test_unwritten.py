"""Hits on what this very step writes: the compiled cache beside the reference."""

from __future__ import annotations

from typing import Any

import pytest

from hkv.contract.traffic import RandomChoices
from hkv.spec import FullAttention, Mamba
from reference.dialects.vllm.kinds.full_attention import FullAttentionKind
from tests.cache.build import config
from tests.cache.pair import Pair
from tests.cache.test_lockstep import engines_in_step
from tests.suites import tails

SEEDS = range(60)


def lockstep(seed: int) -> None:
    header, play = tails.SIBLINGS.begin(RandomChoices(seed), "partial")
    play(engines_in_step(header)[2])


def test_both_forms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[bool] = []
    asked = FullAttentionKind.waits

    def waits(self: FullAttentionKind, hit: Any, demand: Any) -> bool:
        waited.append(asked(self, hit, demand))
        return waited[-1]

    monkeypatch.setattr(FullAttentionKind, "waits", waits)
    for seed in SEEDS:
        lockstep(seed)
    assert sum(waited) > 3


def many_seeds() -> None:
    """Seeds by which planted defects are judged (`tests/mutants`)."""
    for seed in range(600):
        lockstep(seed)


def test_what_a_fork_copies_is_not_written_either() -> None:
    sizes = {"hash_block_size": 4, "scheduler_block_size": 32, "partial_hits": True}
    pair = Pair(config(FullAttention(block_size=16), Mamba(block_size=32), **sizes))
    pair.request("a", 16, range(4))
    assert pair.allocate("a", 12)
    pair.advance("a", 12)
    pair.step()
    assert pair.fork("a", "b")
    assert pair.allocate("b", 4)
    pair.advance("b", 4)
    granted = []
    for id in ("c", "d"):
        pair.request(id, 19, range(4))
        assert pair.lookup(id) == 12
        granted.append(pair.allocate(id, 7, hit=12))
        pair.step()
    assert granted == [False, True]
