"""vLLM 0.33 as a dialect. What the author of an engine under its rules needs stands here, imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hkv.dialects.vllm.engines.engine import Engine, KeyedEngine
    from hkv.dialects.vllm.log.structs import AllocateOp, Allocation, CacheEvent, CacheState, Header, Hit

__all__ = ["AllocateOp", "Allocation", "CacheEvent", "CacheState", "Engine", "Header", "Hit", "KeyedEngine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "engines.engine" if name.endswith("Engine") else "log.structs"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
