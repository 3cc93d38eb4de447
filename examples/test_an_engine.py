"""A property-test suite of an engine: every invariant after every operation, by Hypothesis and by seed.

Example: pytest examples/test_an_engine.py
"""

from __future__ import annotations

import pathlib
import sys

from hkv.dialects.vllm import Engine, Header

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))


def engine(header: Header) -> Engine:
    """The engine under test."""
    from hkv.dialects.vllm.engines.numpy import NumpyEngine

    return NumpyEngine(header)
