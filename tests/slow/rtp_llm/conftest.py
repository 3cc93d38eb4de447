"""Fixtures of `tests/rtp_llm`, for its tests that compile large programs."""

from tests.rtp_llm.conftest import trace

__all__ = ["trace"]
