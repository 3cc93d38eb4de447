"""Dialects by the names that log headers use, HKV's own and those that other packages register.

A package registers its dialect through the entry point group `hkv.dialects`: the entry's name is one that headers use,
its value the place of a subclass of `hkv.contract.dialect.Dialect`, as `package.module:Class`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import traceback

from hkv.contract.dialect import Dialect
from hkv.errors import ConfigError

GROUP = "hkv.dialects"
"""The entry point group."""

DEFAULT = "vllm-0.33"
"""Name of the dialect that is used where none is given."""

BUILT_IN = {
    "vllm-0.33": "hkv.dialects.vllm.dialect:VllmDialect",
    "vllm-0.32": "hkv.dialects.vllm.dialect:EarlierVllmDialect",
    "vllm-0.33/chunks": "hkv.dialects.vllm.offload.dialect:OffloadDialect",
    "vllm-0.33/offload": "hkv.dialects.vllm.offload.dialect:OffloadDialect",
    "rtp-llm/single": "hkv.dialects.rtp_llm.dialect:RtpLlmDialect",
    "rtp-llm/hybrid": "hkv.dialects.rtp_llm.dialect:RtpLlmDialect",
    "rtp-llm/hybrid-pool": "hkv.dialects.rtp_llm.dialect:RtpLlmDialect",
    "sglang-0.5.23": "hkv.dialects.sglang.dialect:SGLangDialect",
}
"""HKV's own dialects: names and places."""


def names() -> tuple[str, ...]:
    """Every name that a header may have: HKV's own first, then those of other packages, sorted."""
    return (*BUILT_IN, *sorted(name for name in _registered() if name not in BUILT_IN))


def dialect_of(name: object) -> Dialect:
    """The dialect that headers call `name`; ConfigError for an unknown name, or a package that cannot be used."""
    if not isinstance(name, str) or name not in names():
        raise ConfigError("dialect", name, f"one of {', '.join(names())}")
    return _made(BUILT_IN.get(name) or _registered()[name], name)


def dialects() -> tuple[Dialect, ...]:
    """Every dialect once, in the order of their names; packages that cannot be used say so when they are asked for."""
    found: dict[Dialect, None] = {}
    for name in names():
        with contextlib.suppress(*() if name in BUILT_IN else (ConfigError,)):
            found[dialect_of(name)] = None
    return tuple(found)


def dialect_at_fault(error: BaseException) -> str | None:
    """Name of the other package's dialect in whose code an error was raised; None where it was in none's.

    What that code calls is its own fault, too, unless it is HKV's.
    """
    packages = {place.partition(".")[0]: name for name, place in _registered().items() if name not in BUILT_IN}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    rooms = [str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames]
    known = [room for room in rooms if room in ("hkv", "reference", *packages)]
    return packages.get(known[-1]) if known else None


@functools.cache
def _registered() -> dict[str, str]:
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=GROUP)}


@functools.cache
def _instance(place: str) -> Dialect:
    module, _, attribute = place.partition(":")
    made = getattr(importlib.import_module(module), attribute)()
    if not isinstance(made, Dialect):
        raise TypeError(f"{place} is no hkv.contract.dialect.Dialect")
    return made


def _made(place: str, name: str) -> Dialect:
    try:
        dialect = _instance(place)
    except Exception as error:
        if name in BUILT_IN:
            raise
        raise ConfigError("dialect", name, f"a package that can be used ({type(error).__name__}: {error})") from error
    if name not in dialect.names:
        raise ConfigError("dialect", name, f"one of the names that {place} has: {', '.join(dialect.names)}")
    return dialect
