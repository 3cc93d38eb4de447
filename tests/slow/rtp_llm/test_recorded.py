"""Logs recorded from RTP-LLM's own C++: the compiled cache answers each operation as it did."""

from __future__ import annotations

import pytest

from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from tests.rtp_llm.test_recorded import NAMES, recorded

JAX = engine_factory("jax")


@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_cache_answers_as_the_engine_did(name: str) -> None:
    difference = check_log(recorded(name), JAX)
    assert difference is None, difference.describe()
