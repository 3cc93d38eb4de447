"""Fixtures of `tests/rtp_llm`, for its tests of whole replays."""

from tests.rtp_llm.conftest import trace

__all__ = ["trace"]
