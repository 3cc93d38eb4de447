"""Exhaustive checking of the compiled cache: every state that a small configuration can reach, every invariant in each.

`explore` goes breadth-first over all sequences of operations of a `Space`; `docs/explore.md` says what that covers.
"""

from hkv.contract.explore_command import Counterexample, Report
from hkv.dialects.vllm.explorer.search import explore
from hkv.dialects.vllm.explorer.space import MOVES, Space

__all__ = ["MOVES", "Counterexample", "Report", "Space", "explore"]
