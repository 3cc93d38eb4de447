"""The protocol by which HKV drives a cache under RTP-LLM's rules, its own or another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from hkv.contract.answer import Failure, attempt_with
from hkv.dialects.rtp_llm.log import RtpAnswer, RtpOp
from hkv.errors import OperationError


@runtime_checkable
class RtpEngine(Protocol):
    """A cache that performs the operations of `hkv.dialects.rtp_llm.log`, as `docs/oplog.md` explains them."""

    def perform(self, operation: RtpOp) -> RtpAnswer:
        """Perform one operation and answer it, with what its field `want` may hold; None where it has none."""
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


def attempt_rtp(engine: RtpEngine, operation: RtpOp) -> RtpAnswer | Failure:
    """Performs one operation; an error, or an answer of the wrong type, stands as a Failure in the answer's place."""
    return attempt_with(lambda engine, operation: engine.perform(operation), engine, operation)


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
