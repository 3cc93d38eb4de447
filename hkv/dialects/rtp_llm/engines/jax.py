"""The text as a compiled engine: `reference.dialects.rtp_llm`, lowered, behind the operations of RTP-LLM's logs.

Configurations are data, so that one program performs every operation of every cache of such sizes.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import Any

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.plain import LAYOUT
from hkv.lowering.programs import Mirror, Program
from reference.dialects.rtp_llm.operations import perform_all
from reference.dialects.rtp_llm.records import Code


class RtpJaxEngine(RtpNumpyEngine):
    """The compiled text under RTP-LLM's rules, an operation a dispatch.

    Args:
      header: the configuration, as a log's first line.

    Raises:
      HKVError: a configuration the dialect forbids.
    """

    room = MappingProxyType(
        {
            **{"keys": 1022, "slots": 16, "batch": 8, "row": 128, "payload": 256, "told": 8192},
            **{"groups": 8, "blocks": 256},
        }
    )

    def __init__(self, header: structs.RtpHeader) -> None:
        super().__init__(header)
        self._mirror: Mirror | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies have arrays of their own."""
        return {**super().__getstate__(), "_mirror": None}

    def _perform(self, code: Code) -> None:
        if self._mirror is None:
            self._mirror = Mirror(LAYOUT, program(), self.cache, ("operations", "payload", "numbers"))
        self._mirror.perform(1)


@functools.cache
def program() -> Program:
    """The program `(state, count) -> state` that performs the first `count` operations in order."""
    return Program(LAYOUT, perform_all)
