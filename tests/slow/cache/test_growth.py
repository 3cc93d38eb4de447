"""More requests than the engine has slots at first: it goes on with more of them, in another program."""

from __future__ import annotations

import pytest

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.engines import jax_batches
from hkv.dialects.vllm.traffic.traffic import draw_header
from tests.cache.test_lockstep import lockstep


def test_more_requests_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 35 at a time."""
    sizes = []
    resize = jax_batches.Dispatcher._resize
    monkeypatch.setattr(
        jax_batches.Dispatcher, "_resize", lambda self, new: sizes.append(new.requests) or resize(self, new)
    )
    choices = RandomChoices(2002)
    lockstep(draw_header(choices, "external", 2), choices)
    assert sizes == [4 * jax_batches.SLOTS]
