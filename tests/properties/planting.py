"""Planting one defect at a time, to see which property finds it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import FunctionType

from hkv.testing.planting import Patch, applied


def planted(function: FunctionType, text: str, defect: str) -> AbstractContextManager[None]:
    """Replaces `text`, which must stand in the function's source exactly once, by `defect`, until the block ends."""
    return applied(Patch(f"{function.__module__}:{function.__qualname__}", text, defect))
