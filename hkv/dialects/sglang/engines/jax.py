"""The text as a compiled engine: `reference.dialects.sglang`, lowered, behind the operations of SGLang's logs.

Configurations are data, so that one program performs every operation of every cache of such sizes: one that were made
for a configuration takes half the time to compile, but a comparison goes through dozens of them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from hkv.dialects.sglang import batches
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.dialects.sglang.plain import LAYOUT
from hkv.errors import UnsupportedConfigError
from hkv.lowering.programs import Mirror
from reference.dialects.sglang.records import Code


class SGLangJaxEngine(SGLangNumpyEngine):
    """The compiled text under SGLang's rules, an operation a dispatch.

    Args:
      header: the configuration, as a log's first line.

    Raises:
      ConfigError: a cache that SGLang does not have, or that has no compiled form.
    """

    room = MappingProxyType({"keys": 1023, "requests": 15, "row": 256, "room": 63})

    def __init__(self, header: structs.Header) -> None:
        if header.tree:
            raise UnsupportedConfigError("tree", True, "false: a tree alone, without pools, has no compiled form")
        super().__init__(header)
        self._mirror: Mirror | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies have arrays of their own."""
        return {**super().__getstate__(), "_mirror": None}

    def _perform(self, code: Code) -> None:
        if self._mirror is None:
            self._mirror = Mirror(LAYOUT, batches.program(), self.cache, ("operations", "payload"))
        self._mirror.perform(1)
