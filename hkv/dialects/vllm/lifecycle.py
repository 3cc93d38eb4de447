"""The order in which a log's operations may come: what each needs to be true of the request it names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.dialects.vllm.config import check_encoder, check_truncation
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Header, Operation
from hkv.errors import OperationError


@dataclasses.dataclass
class RequestState:
    """A request as the operations so far leave it.

    Attributes:
      prompt: tokens it arrived with.
      tokens: tokens it has.
      computed: tokens computed, hits and external ones included.
      granted: tokens that have slots, look-ahead ones not counted.
      running: whether it is between a granted `allocate` and its `free`.
      returned: whether it has run before.
    """

    prompt: int
    tokens: int
    computed: int = 0
    granted: int = 0
    running: bool = False
    returned: bool = False


class Lifecycle:
    """Follows a log operation by operation and refuses one that cannot follow.

    Args:
      header: the log's configuration.

    Attributes:
      num_blocks: blocks in the pool, the null block included.
      requests: every request that has arrived and was not dropped, by id.
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self.num_blocks = header.num_blocks
        self._config = to_config(header)
        self._live = header.oplog >= 3
        self._ended = False
        self._found: tuple[str, int] | None = None
        self.requests: dict[str, RequestState] = {}

    def follow(self, operation: Operation) -> None:
        """Checks one operation and, as far as that needs no answer, performs it.

        Raises:
          OperationError: names the field that does not fit what came before.
        """
        if self._ended:
            raise OperationError("op", operation.__struct_config__.tag, "nothing after the operation that ends a log")
        found, self._found = self._found, None
        match operation:
            case oplog.RequestOp():
                self._arrive(operation)
            case oplog.LookupOp() | oplog.ConnectorLookupOp():
                self._waiting(operation.id)
            case oplog.TruncateOp():
                self._check_rows(operation)
                check_truncation(self._config, operation.rows, operation.tokens)
            case oplog.AllocateOp():
                self._check_allocate(operation, found)
            case oplog.AdvanceOp():
                self._advance(operation)
            case oplog.AppendOp():
                state = self._known(operation.id)
                state.tokens += len(operation.tokens)
                self._check_length(state.tokens)
            case oplog.ResumeOp():
                self._resume(operation)
            case oplog.CommitOp():
                self._check_commit(operation)
            case oplog.FreeOp() | oplog.PopOp():
                state = self._running(operation.id)
                state.computed, state.granted = 0, 0
                state.running, state.returned = False, True
            case oplog.DropOp():
                self._waiting(operation.id)
                del self.requests[operation.id]
            case oplog.EvictOp():
                self._check_blocks("blocks", operation.blocks, 0)
            case oplog.ReleaseOp() | oplog.HoldOp():
                self._check_blocks("blocks", operation.blocks, 1)
            case oplog.ComputedOp():
                self._known(operation.id).computed = operation.tokens
                self._found = found
            case oplog.RetireOp():
                self._known(operation.id)
            case oplog.ZerosOp():
                self._check_zeroing()
            case oplog.UnwrittenOp():
                self._check_zeroing()
                self._running(operation.id)
            case oplog.OffloadsOp():
                self._check_offloads()
            case oplog.FinalizeOp():
                self._check_offloads()
                self._running(operation.id)
            case oplog.EndOp():
                self._ended = True
            case _:
                pass

    def answered(self, operation: Operation, answer: oplog.Answer) -> None:
        """Takes note of what a `lookup` found and whether an `allocate` was granted."""
        if isinstance(operation, oplog.LookupOp) and isinstance(answer, oplog.Hit):
            self._found = (operation.id, answer.hit)
        if not isinstance(operation, oplog.AllocateOp) or not isinstance(answer, oplog.Allocation):
            return
        if answer.blocks is not None:
            state = self.requests[operation.id]
            state.running = True
            state.granted = state.computed + operation.hit + operation.external + operation.new

    def _arrive(self, operation: oplog.RequestOp) -> None:
        if operation.id in self.requests:
            raise OperationError("id", operation.id, "a request that has not arrived before")
        if not operation.tokens:
            raise OperationError("tokens", operation.tokens, "at least one token")
        length = len(operation.tokens)
        self._check_length(length)
        if operation.extra is not None:
            _check_extra(operation.extra, length)
        if operation.report not in (None, oplog.FULL):
            raise OperationError("report", operation.report, f"{oplog.FULL}, or nothing for what is stored alone")
        self.requests[operation.id] = RequestState(length, length)

    def _resume(self, operation: oplog.ResumeOp) -> None:
        state = self._known(operation.id)
        if operation.keep > state.tokens:
            raise OperationError("keep", operation.keep, f"at most the request's {state.tokens} tokens")
        length = operation.keep + len(operation.tokens)
        self._check_length(length)
        if not 1 <= operation.prompt <= length:
            raise OperationError("prompt", operation.prompt, f"1 to {length} tokens")
        if operation.extra is not None:
            _check_extra(operation.extra, length)
        state.tokens, state.prompt = length, operation.prompt

    def _check_allocate(self, operation: oplog.AllocateOp, found: tuple[str, int] | None) -> None:
        state = self._known(operation.id)
        if state.running:
            for name in ("hit", "external"):
                if getattr(operation, name):
                    raise OperationError(name, getattr(operation, name), "0 for a running request")
        elif operation.rows is not None:
            self._check_rows(operation)
        elif operation.hit and found != (operation.id, operation.hit):
            raise OperationError("hit", operation.hit, "the hit of a lookup of this request on the line before")
        if operation.encoder is not None:
            check_encoder(operation.encoder, max(group.get("encoder_len", 0) for group in self._header.groups))
        if operation.shared_prefix is not None and operation.shared_prefix > self._header.max_model_len:
            raise OperationError("shared_prefix", operation.shared_prefix, "at most max_model_len")
        if operation.loaded:
            self._check_loaded(operation.loaded)
        if not operation.new + operation.hit + operation.external:
            raise OperationError("new", 0, "a token to compute or to adopt")
        if not self._live:
            self._check_account(operation, state)

    def _check_account(self, operation: oplog.AllocateOp, state: RequestState) -> None:
        """Checks lengths, which a live engine's own scheduler accounts for (version 3)."""
        start = state.computed + operation.hit + operation.external
        if start > state.tokens:
            raise OperationError("external", operation.external, f"at most the request's {state.tokens} tokens")
        if start + operation.new > self._header.max_model_len:
            raise OperationError("new", operation.new, f"at most max_model_len {self._header.max_model_len} in all")
        if operation.in_flight > state.computed:
            raise OperationError("in_flight", operation.in_flight, f"at most the {state.computed} computed tokens")

    def _check_rows(self, operation: oplog.AllocateOp | oplog.TruncateOp) -> None:
        rows = operation.rows or []
        if len(rows) != len(self._header.groups):
            raise OperationError("rows", f"{len(rows)} rows", f"one for each of {len(self._header.groups)} groups")
        for row in rows:
            self._check_blocks("rows", row, 0)

    def _check_zeroing(self) -> None:
        if not self._header.zeroing:
            raise OperationError("zeroing", False, "a header that says that new blocks are zeroed")

    def _check_offloads(self) -> None:
        if not self._header.offloads:
            raise OperationError("offloads", False, "a header that says that states are offered to a connector")

    def _check_loaded(self, groups: Sequence[int]) -> None:
        self._check_zeroing()
        for group in groups:
            if not 0 <= group < len(self._header.groups):
                raise OperationError("loaded", group, f"groups from 0 on, below {len(self._header.groups)}")

    def _check_blocks(self, name: str, blocks: Sequence[int], least: int) -> None:
        for block in blocks:
            if not least <= block < self._header.num_blocks:
                raise OperationError(name, block, f"block ids from {least} on, below {self._header.num_blocks}")

    def _advance(self, operation: oplog.AdvanceOp) -> None:
        state = self._running(operation.id)
        if state.computed + operation.tokens > state.granted:
            left = state.granted - state.computed
            raise OperationError("tokens", operation.tokens, f"at most the {left} tokens that have slots")
        state.computed += operation.tokens

    def _check_commit(self, operation: oplog.CommitOp) -> None:
        state = self._running(operation.id)
        limit = min(state.computed, state.tokens)
        if operation.tokens > limit and not self._live:
            raise OperationError("tokens", operation.tokens, f"at most the {limit} computed tokens")

    def _check_length(self, tokens: int) -> None:
        if tokens > self._header.max_model_len:
            raise OperationError("tokens", tokens, f"at most max_model_len {self._header.max_model_len} in all")

    def _known(self, id: str) -> RequestState:
        try:
            return self.requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that has arrived and was not dropped") from None

    def _waiting(self, id: str) -> RequestState:
        state = self._known(id)
        if state.running:
            raise OperationError("id", id, "a waiting request")
        return state

    def _running(self, id: str) -> RequestState:
        state = self._known(id)
        if not state.running:
            raise OperationError("id", id, "a running request")
        return state


def _check_extra(extra: oplog.ExtraKeys, length: int) -> None:
    if extra.lora is not None and len(extra.lora) != 2:
        raise OperationError("extra.lora", extra.lora, "a name and a path")
    end = 0
    for item in extra.multimodal:
        _, offset, size = item
        if offset < end or size < 1 or offset + size > length:
            expected = f"items in order, apart, of at least one token, within the prompt's {length} tokens"
            raise OperationError("extra.multimodal", item, expected)
        end = offset + size
    if extra.embeds is None:
        return
    if len(extra.embeds) != length:
        raise OperationError("extra.embeds", f"{len(extra.embeds)} entries", f"one for each of {length} tokens")
    for text in extra.embeds:
        digits = len(text) % 2 == 0 and all(digit in "0123456789abcdef" for digit in text)
        if not text or not digits or len(text) != len(extra.embeds[0]):
            raise OperationError("extra.embeds", text, "bytes in lower-case hex, as many for every token")
