"""An engine in a process of its own, in any language: `docs/oplog.md`, "The process protocol"."""

from __future__ import annotations

from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.oracle.engines.engine_process import TIMEOUT, EngineProcess

PREFIX = "cmd:"
"""Prefix of the name of such an engine; its command line follows."""


def process_factory(command: str, timeout: float = TIMEOUT) -> EngineFactory:
    """A factory that starts `command` afresh for every header.

    Args:
      command: a command line, split as a shell would; no shell runs.
      timeout: seconds that one answer may take.
    """

    def start(header: Any) -> Any:
        return registry.dialect_of(header.dialect).process_engine(EngineProcess(header, command, timeout))

    return start
