"""The oracle: engines of hybrid KV caches driven, compared, diagnosed and explained.

What is public stands here, and is imported only when it is used:

- engines: `Engine`, `KeyedEngine`, `BatchEngine` (protocols to implement), `engine_factory` (engines by name, a
  program, a file), `attempt`, `apply`;
- the log format: `Header`, `Log`, `read_log`, `write_log`, the answers `Hit`, `Allocation`, `CacheEvent`, `CacheState`;
- checking: `check_log`, `differ`, `Only`, `first_broken`, `Shrinker`, and, each in a module of its name,
  `record.record`, `compare.compare`, `explain.explain`.

`docs/checking-your-engine.md` walks through it; `docs/oplog.md` says what every operation means.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hkv.dialects.vllm.engines.engine import Engine, KeyedEngine, apply
    from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, CacheEvent, CacheState, Header, Hit
    from hkv.oracle.broken_invariant import Broken, first_broken
    from hkv.oracle.check import Difference, check_log
    from hkv.oracle.compare import Mismatch
    from hkv.oracle.engine import BatchEngine, EngineFactory, Failure, attempt
    from hkv.oracle.engines import engine_factory
    from hkv.oracle.explain import Explanation
    from hkv.oracle.log_file import Log, find_logs, read_log, write_log
    from hkv.oracle.record import Disagreement, Only, Recording, differ
    from hkv.oracle.shrink import Case, Shrinker

_MODULES = {
    "broken_invariant": ("Broken", "first_broken"),
    "check": ("Difference", "check_log"),
    "compare": ("Mismatch",),
    "engine": ("BatchEngine", "Engine", "EngineFactory", "Failure", "KeyedEngine", "apply", "attempt"),
    "engines": ("engine_factory",),
    "explain": ("Explanation",),
    "log_file": ("Log", "find_logs", "read_log", "write_log"),
    "oplog": ("Allocation", "AllocateOp", "CacheEvent", "CacheState", "Header", "Hit"),
    "record": ("Disagreement", "Only", "Recording", "differ"),
    "shrink": ("Case", "Shrinker"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AllocateOp",
    "Allocation",
    "BatchEngine",
    "Broken",
    "CacheEvent",
    "CacheState",
    "Case",
    "Difference",
    "Disagreement",
    "Engine",
    "EngineFactory",
    "Explanation",
    "Failure",
    "Header",
    "Hit",
    "KeyedEngine",
    "Log",
    "Mismatch",
    "Only",
    "Recording",
    "Shrinker",
    "apply",
    "attempt",
    "check_log",
    "differ",
    "engine_factory",
    "find_logs",
    "first_broken",
    "read_log",
    "write_log",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hkv.oracle.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
