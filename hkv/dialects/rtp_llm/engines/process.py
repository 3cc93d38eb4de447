"""An engine under RTP-LLM's rules in a process of its own: `docs/oplog.md`, "The process protocol"."""

from __future__ import annotations

from collections.abc import Sequence

from hkv.oracle.engines.engine_process import PerformingProcess


class RtpProcessEngine(PerformingProcess):
    """A process that performs the operations of RTP-LLM's logs.

    Implements `hkv.dialects.rtp_llm.engines.engine.KeyedRtpEngine`.
    """

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int], reserve: int) -> None:
        """A request arrives of which only length and prefix keys are known."""
        fields = {"op": "request_keyed", "id": id, "num_tokens": num_tokens, "keys": list(keys), "reserve": reserve}
        self.exchange(fields, "request_keyed", None)

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens are appended to a keyed request."""
        self.exchange({"op": "extend", "id": id, "tokens": tokens}, "extend", None)

    def num_available(self) -> int:
        """Blocks that no request and no connector holds, over all pools."""
        return self.exchange({"op": "num_available"}, "num_available", int)
