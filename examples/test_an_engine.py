"""A property-test suite of an engine: every invariant after every operation, by seed and by Hypothesis.

Example: pytest examples/test_an_engine.py
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

import hkv
from hkv.dialects.vllm import Engine, Header
from hkv.testing import Watch, engine_machine, strategies

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))


def engine(header: Header) -> Engine:
    """The engine under test: put your own here."""
    from hkv.dialects.vllm.engines.numpy import NumpyEngine

    return NumpyEngine(header)


def test_random_traffic(hkv_run_watched: Callable[..., int]) -> None:
    """By seed; the fixture comes with HKV."""
    assert hkv_run_watched(engine, features=["core"], seeds=2, steps=4) > 0


@settings(max_examples=10, deadline=None)
@given(header=strategies.headers(("core",)))
def test_an_empty_cache_is_sound(header: Header) -> None:
    """Configurations that shrink."""
    watched = engine(header)
    Watch(watched, header)
    assert len(watched.state().free) == header.num_blocks - 1


@settings(max_examples=10, deadline=None)
@given(window=st.integers(1, 64), size=st.sampled_from((4, 16)))
def test_what_a_window_reads(window: int, size: int) -> None:
    """A description of a layer, by itself."""
    spec = hkv.SlidingWindow(block_size=size, window=window)
    assert spec.page_size_bytes % size == 0


TestMachine = engine_machine(engine, features=("core",)).TestCase
TestMachine.settings = settings(max_examples=5, stateful_step_count=8, deadline=None)
