"""Bytes that another calculator gives released models: HKV's, or different for a reason that is counted."""

from __future__ import annotations

import pytest

from benchmarks.third_calculator import compared, outcome, recorded
from hkv.model.huggingface import read_model
from hkv.model.released import find

COMPARED = compared()


def test_most_of_its_models_are_compared() -> None:
    assert len(COMPARED) >= 45
    assert sum(reason == "" for reason in COMPARED.values()) >= 35


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_every_difference_has_a_reason(name: str) -> None:
    assert COMPARED[name] is not None


def test_a_difference_of_another_size_has_none() -> None:
    model = find("deepseek-v3.2")
    assert model is not None
    answer, read = recorded()["deepseek-v3.2"], read_model(model.config())
    assert outcome(answer, read, model)
    for change in ({"token_bytes": answer["token_bytes"] - 4}, {"formula": "mla"}):
        assert outcome(answer | change, read, model) is None
