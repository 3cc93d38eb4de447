"""Attaching to vLLM: to one manager, or to every one that a process makes."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hkv.contract import registry
from hkv.contract.attach import Session, observe_share
from hkv.dialects.vllm.attach.header import header_from
from hkv.dialects.vllm.attach.hooks import Hooks
from hkv.dialects.vllm.attach.observer import Observer
from hkv.dialects.vllm.attach.requests import UntellableError
from hkv.dialects.vllm.attach.tensors import attach_tensors
from hkv.dialects.vllm.config import NAME
from hkv.errors import ConfigError


def attach(manager: Any, session: Session, max_in_flight_tokens: int | None = None) -> Observer:
    """Observes one `KVCacheManager` of vLLM 0.33, which has done nothing yet, from now on.

    `max_in_flight_tokens` are those that it was made with; None: derived.

    Raises:
      HKVError: a log has no words for its configuration, or for what it has done already.
    """
    pool = manager.block_pool
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1 or len(pool.cached_block_hash_to_block):
        raise ConfigError("manager", "a manager in use", "one that has handed out and cached nothing yet")
    header = header_from(manager, max_in_flight_tokens)
    registry.dialect_of(NAME).log.check(header)
    try:
        observer = Observer(manager, header, session.sink(registry.dialect_of(NAME)), session.states, Hooks)
    except UntellableError as reason:
        raise ConfigError("manager", "a manager that is observed", str(reason)) from reason
    session.observe(observer)
    return observer


def is_attached() -> bool:
    """True if this process's managers are observed."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return hasattr(KVCacheManager.__init__, "__wrapped__")


def attach_all(session: Session) -> Callable[[], None]:
    """Observes every manager that this process makes, and its worker's tensors, until the function is called that it
    returns.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    made = KVCacheManager.__init__

    @functools.wraps(made)
    def observed(manager: Any, *arguments: Any, **named: Any) -> None:
        made(manager, *arguments, **named)
        if type(manager) is not KVCacheManager:
            session.refuse(type(manager).__name__, "a subclass of KVCacheManager")
        else:
            groups = manager.kv_cache_config.kv_cache_groups
            specs = ",".join(type(group.kv_cache_spec).__name__ for group in groups)
            limit = named.get("max_in_flight_tokens")
            observe_share(session, type(manager).__name__, lambda: attach(manager, session, limit), specs)

    KVCacheManager.__init__ = observed  # type: ignore[method-assign]
    undo: list[Callable[[], None]] = [functools.partial(setattr, KVCacheManager, "__init__", made)]
    if session.tensors != "none":
        undo.append(attach_tensors(session))

    def detach() -> None:
        for each in undo:
            each()

    return detach
