"""Requests of the compiled cache as the host knows them, and answers that come with the next dispatch."""

from __future__ import annotations

import dataclasses
from typing import Any

from hkv.dialects.vllm.engines.jax_reading import Teller
from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.log.structs import AllocateOp, ResumeOp
from hkv.dialects.vllm.rules.operations import Code, Flag
from hkv.errors import OperationError
from hkv.keys.chained import PLAIN, GivenKeys, KeyChain, PrefixIdentity


@dataclasses.dataclass
class Request:
    """A request as the host knows it.

    Attributes:
      slot: its request slot in the compiled cache.
      num_tokens: prompt and output.
      tokens: the tokens themselves; empty for a keyed request.
      chain: computes its prefix keys; None for a keyed request.
      numbers: its prefix keys, interned.
      identity: everything besides its tokens that identifies its prefix.
      session: the session that its events name, "" for none.
      reports: whether its hits are published as events.
      running: True if it holds blocks, as far as answers have come back.
    """

    slot: int
    num_tokens: int
    tokens: list[int]
    chain: KeyChain | GivenKeys | None
    numbers: list[int]
    identity: PrefixIdentity = PLAIN
    session: str = ""
    reports: bool = False

    @property
    def teller(self) -> Teller:
        """The request, as far as events say."""
        return Teller(self.tokens, self.numbers, self.identity, self.session)

    def check_resumption(self, operation: ResumeOp, max_model_len: int) -> None:
        """Makes sure that a streaming session can go on so.

        Raises:
          OperationError: more tokens than it has, or may have; a longer prompt; keys where they are computed.
        """
        if self.chain is None:
            raise OperationError("id", operation.id, "a request that came with tokens")
        if not 0 <= operation.keep <= self.num_tokens:
            raise OperationError("keep", operation.keep, f"at most the request's {self.num_tokens} tokens")
        length = operation.keep + len(operation.tokens)
        if length > max_model_len:
            raise OperationError("tokens", length, f"at most max_model_len {max_model_len} in all")
        if not 1 <= operation.prompt <= length:
            raise OperationError("prompt", operation.prompt, f"1 to {length} tokens")
        if operation.keys and not isinstance(self.chain, GivenKeys):
            raise OperationError("keys", operation.keys, "none: this request's are computed")

    def cut(self, operation: ResumeOp, hash_block_size: int) -> None:
        """Leaves the tokens and keys that stay when a streaming session goes on, and adds the tokens that follow."""
        assert self.chain is not None
        identity = None if operation.extra is None else identity_of(operation.extra)
        self.chain.cut(operation.keep, hash_block_size, identity)
        if isinstance(self.chain, GivenKeys):
            self.chain.give(operation.keys or ())
        self.identity = self.identity if identity is None else identity
        del self.numbers[operation.keep // hash_block_size :]
        self.tokens[operation.keep :] = operation.tokens
        self.num_tokens = len(self.tokens)


def said(operation: AllocateOp) -> Flag:
    """Flags of what an allocation says of its request's status, and of others."""
    flags = Flag(0)
    if operation.waiting is not None:
        flags |= Flag.STATUS | (Flag.WAITING if operation.waiting else Flag(0))
    if operation.scheduled is not None:
        flags |= Flag.OTHERS | (Flag.SCHEDULED if operation.scheduled else Flag(0))
    return flags


@dataclasses.dataclass(frozen=True)
class Room:
    """Room that answers need in the results of a dispatch: block ids and events."""

    ids: int
    events: int


@dataclasses.dataclass
class Later:
    """An answer that comes with the next dispatch."""

    read: Any
    request: Request | None
    code: Code
    value: Any = None
