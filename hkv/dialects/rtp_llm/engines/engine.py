"""The protocol by which HKV drives a cache under RTP-LLM's rules, its own or another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from hkv.contract.answer import Failure, attempt_with
from hkv.contract.dialect import Process
from hkv.dialects.rtp_llm.log.structs import RtpAnswer, RtpOp
from hkv.errors import ConfigError, OperationError


@runtime_checkable
class RtpEngine(Protocol):
    """A cache that performs the operations of `hkv.dialects.rtp_llm.log.structs`, as `docs/oplog.md` explains them."""

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Perform one operation and answer it, with the operation's `answer_type`; None where that is None."""
        ...


@runtime_checkable
class KeyedRtpEngine(RtpEngine, Protocol):
    """An engine that also takes requests whose prefix keys are known beforehand, as a request trace gives them."""

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int], reserve: int) -> None:
        """A request of one sequence arrives whose prompt has `num_tokens` tokens, unnamed.

        `keys[i]`, a non-negative int, identifies the first `(i + 1) * block_size` tokens of the request, in the whole
        of its life: equal keys mean equal tokens from 0 on. Keys beyond the tokens it has so far are not used.
        `reserve` is that of `request`.
        """
        ...

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens, unnamed, are appended to a keyed request."""
        ...

    def num_available(self) -> int:
        """Blocks that no request and no connector holds, over all pools: free ones, and those only the cache holds."""
        ...


def perform_rtp(engine: object, operation: RtpOp) -> RtpAnswer:
    """Performs one operation.

    Raises:
      ConfigError: the engine is none for these logs.
      Exception: whatever the engine raises.
    """
    if not isinstance(engine, RtpEngine):
        raise ConfigError("engine", type(engine).__name__, "an engine that performs operations under RTP-LLM's rules")
    return engine.perform(operation)


def attempt_rtp(engine: object, operation: RtpOp) -> RtpAnswer | Failure:
    """Performs one operation; an error, or an answer of the wrong type, stands as a Failure in the answer's place."""
    return attempt_with(perform_rtp, operation.answer_type, engine, operation)


# Objects that an engine keeps under names that a log gives: held blocks, exported keys.


def check_unused(kept: dict[str, Any], name: str) -> None:
    """Raises OperationError if something is kept under that name."""
    if name in kept:
        raise OperationError("name", name, "a name under which nothing is kept")


def taken(kept: dict[str, Any], name: str) -> Any:
    """Object kept under a name, which is free from then on.

    Raises:
      OperationError: nothing is.
    """
    if name not in kept:
        raise OperationError("name", name, "a name under which something is kept")
    return kept.pop(name)


# An engine under RTP-LLM's rules in a process of its own: `docs/oplog.md`, "The process protocol".


class RtpProcessEngine:
    """A process that performs the operations of RTP-LLM's logs.

    Implements `hkv.dialects.rtp_llm.engines.engine.KeyedRtpEngine`.
    """

    def __init__(self, process: Process) -> None:
        self.perform, self.exchange, self.close = process.perform, process.exchange, process.close
        self.lacks = process.lacks

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
