"""Requests of a live vLLM as a log tells them: arrivals, tokens, computed tokens, names that come again."""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hkv.contract.attach import fits_a_log
from hkv.dialects.vllm.attach.header import Seen, SessionTurn
from hkv.dialects.vllm.engines.numpy import identity_of
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import ExtraKeys, Header
from hkv.errors import HKVError
from hkv.keys.chained import DIGESTS, GIVEN, PLAIN, KeyChain


class UntellableError(Exception):
    """Something happened that a log has no words for; the reason is its text."""


@dataclasses.dataclass(eq=False)
class Tracked:
    """A request as the log knows it: vLLM's object, and what was told of it.

    Attributes:
      tokens: its tokens when they were last looked at: when it came, until the hash is known, of a streaming session;
        `hashes`, its block hashes at that time.
      told: number of tokens told; `keys` of keys, None where the log's reader computes them.
      running: whether it holds blocks.
      turn: of a streaming session, the lengths of its prompt and of its multimodal items as told; else None.
    """

    name: str
    request: Any
    tokens: list[int]
    hashes: list[bytes]
    told: int = 0
    computed: int = 0
    keys: int | None = None
    shared_prefix: int = 0
    running: bool = False
    report: str | None = None
    turn: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        mode = getattr(self.request, "kv_cache_report_mode", None)  # pooling requests have none
        self.report = mode if mode == oplog.FULL else None


class Requests:
    """Tells requests and what became of them; the header's hash is changed while nothing was told of the keys.

    Attributes:
      tracked: every request that the log knows, by vLLM's id.
      hash_known: whether the header names the chain hash.
      identities_told: whether the log says of every request so far what identifies its prefix besides its tokens.
    """

    def __init__(self, header: Header, tell: Callable[[Any], None]) -> None:
        self._header, self._tell = header, tell
        self.identities_told = True
        self.tracked: dict[str, Tracked] = {}
        self._names: dict[str, int] = {}
        self._undecided: list[tuple[Tracked, oplog.RequestOp]] = []
        self.hash_known = not header.caching

    def up_to_date(self, seen: Seen) -> Tracked:
        """The request, everything told that has changed since.

        Raises:
          UntellableError: a log has no words for it.
        """
        request, computed, length, count, tokens, hashes = seen
        tracked = self.tracked.get(request.request_id)
        if tracked is not None and tracked.request is not request:
            if tracked.running:
                raise UntellableError(f"another request of the name {request.request_id}, whose blocks it takes over")
            self.drop(tracked)
            tracked = None
        if tracked is None:
            turn = (tokens.prompt, tokens.items) if isinstance(tokens, SessionTurn) else None
            tracked = self._arrive(request, tokens[:length], hashes[:count], turn)
        if computed != tracked.computed:
            if not 0 <= computed <= self._header.max_model_len:
                raise UntellableError(f"{computed} computed tokens")
            tracked.computed = computed
            self._tell(oplog.ComputedOp(id=tracked.name, tokens=computed))
        if length != tracked.told or request.resumable:
            self._append(tracked, seen)
        return tracked

    def drop(self, tracked: Tracked) -> None:
        """The request is heard of no more."""
        del self.tracked[tracked.request.request_id]
        self._tell(oplog.DropOp(id=tracked.name))

    def probe(self, seen: Seen) -> str:
        """Another request of the same tokens, under its own name, which may be looked up in its place."""
        request = seen[0]
        name = self._name(f"{request.request_id}?")
        _, _, length, count, tokens, hashes = seen
        again = Tracked(name, request, tokens[:length], hashes[:count])
        self._tell(self._arrival(again, again.tokens))
        return name

    def _arrive(self, request: Any, tokens: list[int], hashes: list[bytes], turn: tuple[int, int] | None) -> Tracked:
        prompt = tokens[: turn[0] if turn is not None else request.num_prompt_tokens]
        if not prompt:
            raise UntellableError(f"request {request.request_id} without tokens")
        tracked = Tracked(self._name(request.request_id), request, tokens, hashes, told=len(prompt), turn=turn)
        operation = self._arrival(tracked, prompt)
        self.tracked[request.request_id] = tracked
        self._tell(operation)
        if not self.hash_known:
            self._undecided.append((tracked, operation))
            self._decide(tracked)
        return tracked

    def _arrival(self, tracked: Tracked, prompt: list[int]) -> oplog.RequestOp:
        self._check(len(tracked.tokens), prompt)
        extra = _extra(tracked.request, *((tracked.turn[1], tracked.turn[0]) if tracked.turn is not None else ()))
        self.identities_told &= extra is not None
        operation = oplog.RequestOp(
            id=tracked.name,
            tokens=prompt,
            extra=extra if extra != ExtraKeys() else None,
            session=tracked.request.session_id or None,
            report=tracked.report,
        )
        if self._is_given(tracked, extra):
            operation.keys = [bytes(key).hex() for key in tracked.hashes]
            tracked.keys = len(tracked.hashes)
        return operation

    def _is_given(self, tracked: Tracked, extra: ExtraKeys | None) -> bool:
        """True if the reader of the log cannot compute the request's keys."""
        if not self._header.caching:
            return False
        known_given = self.hash_known and self._header.hash == GIVEN
        unknown = tracked.request._block_hasher is None or extra is None or known_given
        return unknown or len(tracked.hashes) != self._expected(len(tracked.tokens))

    def _expected(self, tokens: int) -> int:
        return max(0, tokens - self._header.hash_lookahead) // self._header.hash_block_size

    def _append(self, tracked: Tracked, seen: Seen) -> None:
        request, _, length, count, tokens, hashes = seen
        told = tracked.told
        if isinstance(tokens, SessionTurn) and self._has_turned(tracked, tokens, hashes):
            self._resume(tracked, tokens, hashes)
            return
        if length < told:
            raise UntellableError(f"request {tracked.name} has {told - length} tokens fewer than before")
        if length == told:
            return
        more = tokens[told:length]
        self._check(length, more)
        keys = self._told_keys(tracked, hashes[:count], tracked.keys or 0, length)
        operation = oplog.AppendOp(id=tracked.name, tokens=more, keys=keys)
        tracked.told = length
        if request.resumable or not self.hash_known:
            tracked.tokens, tracked.hashes = tokens[:length], hashes[:count]
        self._tell(operation)
        self._decide(tracked)

    def _told_keys(self, tracked: Tracked, hashes: list[bytes], first: int, length: int) -> list[str] | None:
        """A request's keys from `first` on; None where the log's reader computes them, and must get as many."""
        if tracked.keys is not None:
            tracked.keys = len(hashes)
            return [bytes(key).hex() for key in hashes[first:]]
        if self._header.caching and len(hashes) != self._expected(length):
            raise UntellableError(f"request {tracked.name} with {len(hashes)} keys of {length} tokens")
        return None

    def _has_turned(self, tracked: Tracked, tokens: SessionTurn, hashes: list[bytes]) -> bool:
        """True if more happened to a streaming session than that tokens were appended."""
        kept = tokens[: tracked.told] == tracked.tokens[: tracked.told]
        same = hashes[: len(tracked.hashes)] == tracked.hashes
        return not (kept and same) or tracked.turn != (tokens.prompt, tokens.items)

    def _resume(self, tracked: Tracked, tokens: SessionTurn, hashes: list[bytes]) -> None:
        """Tells that a streaming session goes on: with its first tokens, as far as they and their hashes stay."""
        before, items = tracked.tokens[: tracked.told], tracked.turn[1] if tracked.turn is not None else 0
        keep = next(
            (i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), min(len(before), len(tokens))
        )
        size = self._header.hash_block_size
        known = min(keep // size, len(tracked.hashes))
        if tracked.hashes[:known] != hashes[:known]:
            keep = 0  # hashed anew
        more = tokens[keep:]
        self._check(len(tokens), more)
        operation = oplog.ResumeOp(id=tracked.name, keep=keep, tokens=more, prompt=tokens.prompt)
        if tokens.items != items:
            operation.extra = _extra(tracked.request, tokens.items, tokens.prompt)
            self.identities_told &= operation.extra is not None
        if tracked.keys is None and self._header.caching and (operation.extra is None) == (tokens.items != items):
            raise UntellableError(f"request {tracked.name} with other multimodal items, which a log has no words for")
        operation.keys = self._told_keys(tracked, hashes, keep // size, len(tokens))
        tracked.told, tracked.tokens, tracked.hashes = len(tokens), list(tokens), hashes
        tracked.turn = tokens.prompt, tokens.items
        self._tell(operation)
        self._decide(tracked)

    def _check(self, length: int, tokens: list[int]) -> None:
        if length > self._header.max_model_len:
            raise UntellableError(f"a request of {length} tokens, more than max_model_len")
        if not fits_a_log(tokens):
            raise UntellableError("a token id of more than 32 bits")

    def _name(self, wanted: str) -> str:
        count = self._names[wanted] = self._names.get(wanted, 0) + 1
        return wanted if count == 1 else f"{wanted}#{count}"

    # The chain hash: the manager does not know it, the first key of a request shows it.

    def _decide(self, tracked: Tracked) -> None:
        if self.hash_known or not tracked.hashes or tracked.request._block_hasher is None:
            return
        self._header.hash, self._header.hash_seed = _hash_of(tracked, self._header)
        self.hash_known = True
        if self._header.hash == GIVEN:
            for each, operation in self._undecided:
                if operation.keys is None:
                    operation.keys = [bytes(key).hex() for key in each.hashes]
                    each.keys = len(operation.keys)
        self._undecided.clear()


def _hash_of(tracked: Tracked, header: Header) -> tuple[str, str]:
    """Name and seed of the chain hash that made a request's first key; `given` where HKV has none."""
    from vllm.v1.core import kv_cache_utils

    seed = kv_cache_utils.get_none_hash_seed()
    extra = _extra(tracked.request)
    if extra is None:
        return GIVEN, header.hash_seed
    until = header.hash_block_size + header.hash_lookahead
    for name, digest in DIGESTS.items():
        try:
            identity = PLAIN if extra == ExtraKeys() else identity_of(extra)
            chain = KeyChain(digest, header.hash_block_size, header.hash_lookahead, identity, seed)
            chain.extend(tracked.tokens[:until])
        except HKVError:
            continue
        if chain.keys and chain.keys[0] == tracked.hashes[0]:
            return name, seed
    return GIVEN, header.hash_seed


def _extra(request: Any, count: int | None = None, prompt: int | None = None) -> ExtraKeys | None:
    """Everything besides its tokens that identifies a request's prefix; None where a log has no words for it.

    `count` and `prompt` say how many of its multimodal items and of its tokens, if not all that it has now.
    """
    if request.prompt_embeds is not None:
        return None
    items = []
    end = 0
    for feature in request.mm_features[:count]:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < end or length < 1 or offset + length > (prompt or request.num_prompt_tokens):
            return None
        end = offset + length
        items.append((feature.identifier, offset, length))
    lora = request.lora_request
    return ExtraKeys(
        lora=None if lora is None else [lora.lora_name, lora.lora_path],
        multimodal=items,
        salt=request.cache_salt,
    )
