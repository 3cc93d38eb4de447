"""The formulas of each kind of layer, beside the reference's and beside their inverses."""

from __future__ import annotations

from types import ModuleType

import jax.numpy as jnp
import pytest

from hkv.dialects.vllm import kinds
from hkv.spec import KINDS

MODULES = sorted(kinds.all_kinds().items())
N = jnp.arange(200)


def test_every_kind_of_layer_has_rules() -> None:
    assert set(kinds.all_kinds()) == set(KINDS)


@pytest.mark.parametrize(("name", "module"), MODULES, ids=[name for name, _ in MODULES])
@pytest.mark.parametrize("reach", [1, 3, 8, 13])
def test_the_last_query_is_the_inverse(name: str, module: ModuleType, reach: int) -> None:
    skipped = module.skipped_tokens(N, reach).tolist()
    assert skipped == sorted(skipped)
    for end in (1, 4, 8, 40):
        last = int(module.last_query(jnp.int32(end), reach))
        assert [n for n in range(200) if skipped[n] < end] == list(range(min(last + 1, 200))), name
