"""Requests of a live vLLM as a log tells them: arrivals, tokens, computed tokens, names that come again."""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import ExtraKeys, Header
from hkv.errors import HKVError
from hkv.keys.chained import DIGESTS, GIVEN, PLAIN, KeyChain
from hkv.oracle.attach.sink import fits_a_log


class UntellableError(Exception):
    """Something happened that a log has no words for; the reason is its text."""


@dataclasses.dataclass(eq=False)
class Tracked:
    """A request as the log knows it.

    Attributes:
      name: its name in the log.
      request: vLLM's object.
      tokens: number of tokens told.
      computed: `computed` as told.
      keys: number of keys told; None where the log's reader computes them.
      shared_prefix: boundary as told.
      running: whether it holds blocks.
    """

    name: str
    request: Any
    tokens: int = 0
    computed: int = 0
    keys: int | None = None
    shared_prefix: int = 0
    running: bool = False


class Requests:
    """Tells requests and what became of them.

    Args:
      header: the log's header; its hash is changed while nothing was told of the keys.
      tell: takes an operation.
    """

    def __init__(self, header: Header, tell: Callable[[Any], None]) -> None:
        self._header, self._tell = header, tell
        self._by_id: dict[str, Tracked] = {}
        self._names: dict[str, int] = {}
        self._undecided: list[tuple[Tracked, oplog.RequestOp]] = []
        self.hash_known = not header.caching

    def known(self, request_id: str) -> Tracked | None:
        """The request of that id, if the log knows it."""
        return self._by_id.get(request_id)

    @property
    def tracked(self) -> dict[str, Tracked]:
        """Every request that the log knows, by vLLM's id."""
        return self._by_id

    def up_to_date(self, request: Any) -> Tracked:
        """The request, everything that changed since told.

        Raises:
          UntellableError: a log has no words for it.
        """
        tracked = self._by_id.get(request.request_id)
        if tracked is not None and tracked.request is not request:
            if tracked.running:
                raise UntellableError(f"another request of the name {request.request_id}, whose blocks it takes over")
            self.drop(tracked)
            tracked = None
        if tracked is None:
            tracked = self._arrive(request)
        computed = request.num_computed_tokens
        if computed != tracked.computed:
            if not 0 <= computed <= self._header.max_model_len:
                raise UntellableError(f"{computed} computed tokens")
            tracked.computed = computed
            self._tell(oplog.ComputedOp(id=tracked.name, tokens=computed))
        self._append(tracked)
        return tracked

    def drop(self, tracked: Tracked) -> None:
        """The request is heard of no more."""
        del self._by_id[tracked.request.request_id]
        self._tell(oplog.DropOp(id=tracked.name))

    def probe(self, request: Any) -> str:
        """Another request of the same tokens, under its own name, which may be looked up in its place."""
        name = self._name(f"{request.request_id}?")
        operation, _ = self._arrival(name, request, list(request.all_token_ids))
        self._tell(operation)
        return name

    def _arrive(self, request: Any) -> Tracked:
        prompt = list(request.all_token_ids)[: request.num_prompt_tokens]
        if not prompt:
            raise UntellableError(f"request {request.request_id} without tokens")
        operation, keys = self._arrival(self._name(request.request_id), request, prompt)
        tracked = Tracked(operation.id, request, len(prompt), keys=keys)
        self._by_id[request.request_id] = tracked
        self._tell(operation)
        if not self.hash_known:
            self._undecided.append((tracked, operation))
            self._decide(request)
        return tracked

    def _arrival(self, name: str, request: Any, prompt: list[int]) -> tuple[oplog.RequestOp, int | None]:
        self._check(len(request.all_token_ids), prompt)
        extra = _extra(request)
        given = self._is_given(request, extra)
        operation = oplog.RequestOp(id=name, tokens=prompt, extra=extra if extra != ExtraKeys() else None)
        if not given:
            return operation, None
        operation.keys = [bytes(key).hex() for key in request.block_hashes]
        return operation, len(request.block_hashes)

    def _is_given(self, request: Any, extra: ExtraKeys | None) -> bool:
        """True if the reader of the log cannot compute the request's keys."""
        if not self._header.caching:
            return False
        unknown = request._block_hasher is None or extra is None or (self.hash_known and self._header.hash == GIVEN)
        return unknown or len(request.block_hashes) != self._expected(request.num_tokens)

    def _expected(self, tokens: int) -> int:
        return max(0, tokens - self._header.hash_lookahead) // self._header.hash_block_size

    def _append(self, tracked: Tracked) -> None:
        request = tracked.request
        length = len(request.all_token_ids)
        if length < tracked.tokens:
            raise UntellableError(f"request {tracked.name} has {tracked.tokens - length} tokens fewer than before")
        if length == tracked.tokens:
            return
        tokens = list(request.all_token_ids[tracked.tokens :])
        self._check(length, tokens)
        operation = oplog.AppendOp(id=tracked.name, tokens=tokens)
        if tracked.keys is not None:
            operation.keys = [bytes(key).hex() for key in request.block_hashes[tracked.keys :]]
            tracked.keys = len(request.block_hashes)
        elif self._header.caching and len(request.block_hashes) != self._expected(length):
            raise UntellableError(f"request {tracked.name} with {len(request.block_hashes)} keys of {length} tokens")
        tracked.tokens = length
        self._tell(operation)
        if not self.hash_known:
            self._decide(request)

    def _check(self, length: int, tokens: list[int]) -> None:
        if length > self._header.max_model_len:
            raise UntellableError(f"a request of {length} tokens, more than max_model_len")
        if not fits_a_log(tokens):
            raise UntellableError("a token id of more than 32 bits")

    def _name(self, wanted: str) -> str:
        count = self._names[wanted] = self._names.get(wanted, 0) + 1
        return wanted if count == 1 else f"{wanted}#{count}"

    # The chain hash: the manager does not know it, the first key of a request shows it.

    def _decide(self, request: Any) -> None:
        if not request.block_hashes or request._block_hasher is None:
            return
        self._header.hash, self._header.hash_seed = _hash_of(request, self._header)
        self.hash_known = True
        if self._header.hash == GIVEN:
            for tracked, operation in self._undecided:
                if operation.keys is None:
                    operation.keys = [bytes(key).hex() for key in tracked.request.block_hashes]
                    tracked.keys = len(operation.keys)
        self._undecided.clear()


def _hash_of(request: Any, header: Header) -> tuple[str, str]:
    """Name and seed of the chain hash that made a request's first key; `given` where HKV has none."""
    from vllm.v1.core import kv_cache_utils

    seed = kv_cache_utils.get_none_hash_seed()
    extra = _extra(request)
    if extra is None:
        return GIVEN, header.hash_seed
    reach = header.hash_block_size + header.hash_lookahead
    for name, digest in DIGESTS.items():
        try:
            identity = PLAIN if extra == ExtraKeys() else identity_of(extra)
            chain = KeyChain(digest, header.hash_block_size, header.hash_lookahead, identity, seed)
            chain.extend(list(request.all_token_ids)[:reach])
        except HKVError:
            continue
        if chain.keys and chain.keys[0] == request.block_hashes[0]:
            return name, seed
    return GIVEN, header.hash_seed


def _extra(request: Any) -> ExtraKeys | None:
    """Everything besides its tokens that identifies a request's prefix; None where a log has no words for it."""
    if request.prompt_embeds is not None:
        return None
    items = []
    end = 0
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < end or length < 1 or offset + length > request.num_prompt_tokens:
            return None
        end = offset + length
        items.append((feature.identifier, offset, length))
    lora = request.lora_request
    return ExtraKeys(
        lora=None if lora is None else [lora.lora_name, lora.lora_path],
        multimodal=items,
        salt=request.cache_salt,
    )
