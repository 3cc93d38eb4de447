"""Attaching to live engines, whichever dialect they follow."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

from hkv.contract import registry
from hkv.contract.attach import Observed
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.oracle.attach.judged import STORES, judge_stores
from hkv.oracle.attach.session import Session
from hkv.oracle.attach.settings import AttachSettings, settings_of


def attach(target: Any, settings: AttachSettings | str, dialect: str = registry.DEFAULT) -> tuple[Session, Observed]:
    """Observes one live cache from now on, until the session is closed.

    Args:
      target: the cache, such as vLLM's `KVCacheManager`; it has done nothing yet.
      settings: the settings, or a folder for the logs.
      dialect: name of the dialect whose rules it follows.

    Raises:
      HKVError: it cannot be observed.
    """
    session = Session(settings_of(settings) if isinstance(settings, str) else settings)
    return session, registry.dialect_of(dialect).attach(target, session)


def attach_all(settings: AttachSettings | str) -> Session:
    """Observes every cache that this process makes, of each installed engine that a dialect can observe, and judges the
    calls of each installed store of chunks.

    Raises:
      ConfigError: there is no such engine.
    """
    session = Session(settings_of(settings) if isinstance(settings, str) else settings)
    observed = []
    for dialect in registry.dialects():
        if dialect.attached_package and importlib.util.find_spec(dialect.attached_package) is not None:
            with contextlib.suppress(UnsupportedConfigError):
                dialect.attach_all(session)
                observed.append(dialect.title)
    observed += [judge.package for judge in judge_stores(session)]
    if not observed:
        packages = [dialect.attached_package for dialect in registry.dialects() if dialect.attached_package] + [*STORES]
        raise ConfigError("attach", None, f"an engine to observe: none of {', '.join(packages)} is installed")
    return session
