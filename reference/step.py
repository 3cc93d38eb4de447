"""The twin of `hkv.cache.step`: the same step on the reference manager, one row after the other.

It is also the definition: first every row gives back what it cannot read any more, then every row allocates and
advances. With `interleaved` every row does both before the next one does, as vLLM 0.33's scheduler has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hkv.dialects.vllm.config import VllmConfig
from reference.dialects.vllm.coordinator import retire
from reference.dialects.vllm.dialect import VLLM
from reference.dialects.vllm.kinds.mamba import MambaKind, MambaRow
from reference.dialects.vllm.manager import Manager
from reference.dialects.vllm.request import Request
from reference.keys import fingerprint
from reference.state.key_table import Key
from reference.state.pool import NULL

OK, NO_ROOM, ROW_FULL, NOT_RUNNING, OUT_OF_RANGE, CROSSES_STATE = 0, 2, 3, 6, 10, 25
"""Statuses, as `hkv.state.status.Status` numbers them."""


class FingerprintRequest(Request):
    """A request whose prefixes are called by their fingerprints, tuples of four ints.

    Attributes:
      given: tokens that it came with, of which it has only those whose steps have been taken.
    """

    def __init__(self, id: str, root: Sequence[int], hash_block_size: int, prompt: int, lookahead: int = 0) -> None:
        super().__init__(id, prompt, 0, [])
        self.given = 0
        self._root = tuple(int(word) for word in root)
        self._size = hash_block_size
        self._lookahead = lookahead

    @property
    def num_keys(self) -> int:
        """Keys of what is computed, and of the rest of the prompt, whose tokens come with later steps."""
        return max(len(self.keys), (self.num_prompt - self._lookahead) // self._size)

    @property
    def prefill_end(self) -> int:
        """As of a request that has all the tokens that it came with."""
        return max(super().prefill_end, self.given - 1)

    @property
    def links(self) -> list[tuple[int, ...]]:
        """The keys of whole hash blocks without what they cover after those."""
        whole = np.array(self.tokens[: len(self.tokens) // self._size * self._size], np.int64).reshape(-1, self._size)
        return [tuple(int(word) for word in key) for key in fingerprint.keys(whole, self._root)]

    def append(self, tokens: Sequence[int]) -> None:
        """`tokens` follow."""
        self._set([*self.tokens, *tokens])

    def truncate(self, num_tokens: int) -> None:
        """Tokens from `num_tokens` on are taken back."""
        self._set(self.tokens[:num_tokens])

    def _set(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_tokens = len(tokens)
        ends = range(self._size, len(tokens) - self._lookahead + 1, self._size)
        after = [tokens[end : end + self._lookahead] for end in ends]
        self.keys[:] = [fingerprint.ahead(*pair) for pair in zip(self.links, after, strict=False)]


class StepMamba(MambaKind):
    """Recurrent states of rows that copy what they came by in their first step, not when they arrive.

    A registered state that others wait to copy is left to them: its owner goes on in the copy. A state inside a chunk
    is registered with that chunk, and its block under no other key while it stands.
    """

    waited_for: frozenset[int] = frozenset()
    """Blocks that had several references when the step began to allocate."""

    def register(self, request: Request, tokens: int) -> range:
        """As vLLM 0.33, but no column up to such a state's is looked at again: it leaves no column to later steps."""
        span, row = super().register(request, tokens), self.row(request.id)
        if self.aligned and row.checkpoint is not None:
            row.registered = max(row.registered or 0, row.checkpoint[1] + 1)
        return span

    def _register_tail(self, row: MambaRow, request: Request, tokens: int) -> Key | None:
        """As vLLM 0.33, where the key is known already: tokens of the prompt that it covers come with later steps."""
        if row.checkpoint is None and tokens > len(request.keys) * self.hash_block_size:
            return None
        return super()._register_tail(row, request, tokens)

    def checkpoint(self, id: str) -> tuple[int, int] | None:
        """The state that the chunk at hand leaves inside it: its length in tokens, and its block; None for none."""
        left = self.row(id).checkpoint if id in self.rows else None
        if left is None:
            return None
        length, column = left
        block = self.row(id).blocks[column]
        return None if block == NULL else (length, block)

    def _leave_copy_to_cache(self, row: MambaRow, copy: int) -> None:
        assert row.partial is not None
        if row.partial[1] in self.waited_for:
            self.copy_on_write(row, copy)
        else:
            super()._leave_copy_to_cache(row, copy)


IN_STEPS = (StepMamba,)
"""Kinds whose rules whole steps change, each a subclass of the kind that it stands for."""

STEPS = dataclasses.replace(
    VLLM,
    kinds={
        name: next((changed for changed in IN_STEPS if kind in changed.__bases__), kind)
        for name, kind in VLLM.kinds.items()
    },
)
"""vLLM 0.33's rules, as whole steps follow them."""


class Rows:
    """R rows of requests over a reference manager.

    Args:
      config: the configuration.
      num_rows: R.
      width: most blocks of a request in one group.

    Attributes:
      manager: manager that holds the blocks.
      names: the request in each row, or None.
      copies: copies of the last step, (row, group, block, copy): made before anything of it is written.
      checkpoints: states that chunks of the last step leave behind, (row, group, tokens of the chunk, block).
    """

    def __init__(self, config: VllmConfig, num_rows: int, width: int) -> None:
        self.config = config
        self.width = width
        self.manager = Manager(config, STEPS)
        self.manager.pool.records = False
        self.names: list[str | None] = [None] * num_rows
        self.copies: list[tuple[int, int, int, int]] = []
        self.checkpoints: list[tuple[int, int, int, int]] = []
        self._started = 0

    def start(self, row: int, root: Sequence[int] = fingerprint.ROOT, prompt: int = 0) -> None:
        """A request begins in an empty row, with a prompt of so many tokens."""
        assert self.names[row] is None, "a row holds one request"
        name = f"r{self._started}"
        self._started += 1
        self.names[row] = name
        self.manager.requests[name] = self._request(name, root, prompt)

    def _request(self, name: str, root: Sequence[int], prompt: int) -> FingerprintRequest:
        return FingerprintRequest(name, root, self.config.hash_block_size, prompt, self.config.hash_lookahead)

    def arrive(
        self, row: int, tokens: Sequence[int], root: Sequence[int] = fingerprint.ROOT, prompt: int | None = None
    ) -> int:
        """A request with `tokens` begins in an empty row, and adopts what the cache has of them. Returns its hit."""
        self.start(row, root, len(tokens) if prompt is None else prompt)
        request = self.request(row)
        assert request is not None
        self.manager.step()
        request.append(tokens)
        request.given = len(tokens)
        found = self.manager.lookup(request.id)
        hit, request.shared_prefix = found.hit, found.shared_prefix
        if hit:
            # By itself a hit takes no block; `Manager.allocate` would also give opaque groups theirs.
            for kind, blocks in zip(self.manager.cache.kinds, found.blocks, strict=True):
                kind.adopt(request.id, blocks, hit, 0)
            request.running = True
            request.num_computed = request.num_granted = hit
        request.truncate(hit)
        return hit

    def insert(self, entries: Sequence[tuple[int, tuple[int, ...]]]) -> list[int] | None:
        """Blocks under groups and keys, as if a request had held them and gave them back in this order.

        Returns the new block of each entry, -1 for those that are there already or repeated; None where too few are
        free, which changes nothing.
        """
        pool, known = self.manager.pool, dict[tuple[int, tuple[int, ...]], int | None]()
        for entry in entries:
            known[entry] = pool.table.first(entry)
        held = [block for block in known.values() if block is not None]
        new = [entry for entry, block in known.items() if block is None]
        if len(new) > len(pool.free) - sum(pool.refs[block] == 0 for block in held):
            return None
        pool.touch(held)
        taken = dict(zip(new, pool.take(len(new)), strict=True))
        for entry, block in taken.items():
            pool.insert(entry, block, 0)
        pool.release([taken[entry] if block is None else block for entry, block in known.items()])
        return [taken.pop(entry, -1) for entry in entries]

    def finish(self, row: int) -> None:
        """The row's request ends."""
        name = self.names[row]
        assert name is not None, "a row without a request cannot end one"
        if self.manager.requests[name].running:
            self.manager.free(name)
        self.manager.drop(name)
        self.names[row] = None

    def request(self, row: int) -> FingerprintRequest | None:
        """The request in a row."""
        name = self.names[row]
        if name is None:
            return None
        request = self.manager.requests[name]
        assert isinstance(request, FingerprintRequest)
        return request

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        lookahead: Sequence[int],
        in_flight: Sequence[int],
        *,
        order: Sequence[int] | None = None,
        interleaved: bool = False,
    ) -> list[int]:
        """A step: each row computes its `tokens`; rows without any are left out. Returns their statuses.

        Args:
          tokens: each row's settled tokens.
          lookahead: drafts of each row that need slots.
          in_flight: tokens of each row whose steps have not come back.
          order: the rows, in the order in which they are served; None for their own.
          interleaved: whether a row allocates before the next one gives back.
        """
        status = [self._check(row, len(new), lookahead[row]) for row, new in enumerate(tokens)]
        taking = [row for row in order or range(len(tokens)) if tokens[row] and status[row] == OK]
        for row in [] if interleaved else taking:
            self._retire(row, in_flight[row])
        kinds = self.manager.cache.kinds
        for _, kind in self._states():
            kind.waited_for = frozenset(block for block, refs in enumerate(self.manager.pool.refs) if refs > 1)
        self.copies, self.checkpoints = [], []
        for row in taking:
            before = [len(kind.copies) for kind in kinds]
            status[row] = self._compute(row, tokens[row], lookahead[row], in_flight[row])
            if status[row] == OK:
                self._note_checkpoints(row, len(tokens[row]))
            for group, kind in enumerate(kinds):
                self.copies += [(row, group, *copy) for copy in kind.copies[before[group] :]]
        self.manager.copies()
        return status

    def _check(self, row: int, count: int, lookahead: int) -> int:
        request = self.request(row)
        if count == 0:
            return OK
        if request is None:
            return NOT_RUNNING
        main = request.num_computed + count
        slots = min(main + lookahead, self.config.max_model_len)
        for size, spec in zip(self.config.block_sizes, self.config.topology.specs, strict=True):
            aligned, scratch = spec.keeps_states, getattr(spec, "num_speculative_blocks", 0)
            columns = 1 if spec.one_block else -(-(main if aligned else slots) // size) + scratch
            if columns > self.width:
                return ROW_FULL
        if main > self.config.max_model_len:
            return ROW_FULL
        return CROSSES_STATE if count > self.allowed(row) else OK

    def allowed(self, row: int) -> int:
        """Most tokens of a row's next step: up to the end of the recurrent group's block that it stands inside."""
        request, allowed = self.request(row), self.config.max_model_len
        for size, spec in zip(self.config.block_sizes, self.config.topology.specs, strict=True):
            if request is not None and self.config.caching and spec.keeps_states and spec.prefix_cacheable:
                rest = -request.num_computed % size
                allowed = min(allowed, rest) if rest else allowed
        return allowed

    def _retire(self, row: int, in_flight: int) -> None:
        request = self.request(row)
        assert request is not None
        retire(self.manager.cache, request.id, max(0, request.num_computed - in_flight))

    def _compute(self, row: int, tokens: Sequence[int], lookahead: int, in_flight: int) -> int:
        request = self.request(row)
        assert request is not None
        before = request.num_tokens
        request.append(tokens)
        granted = self.manager.allocate(request.id, len(tokens), lookahead=lookahead, in_flight=in_flight)
        if granted is None:
            request.truncate(before)
            return NO_ROOM
        self.manager.advance(request.id, len(tokens))
        return OK

    def _states(self) -> list[tuple[int, StepMamba]]:
        """Groups whose rules whole steps change, by index."""
        return [(group, kind) for group, kind in enumerate(self.manager.cache.kinds) if isinstance(kind, IN_STEPS)]

    def _note_checkpoints(self, row: int, count: int) -> None:
        request = self.request(row)
        assert request is not None
        for group, kind in self._states():
            left = kind.checkpoint(request.id)
            if left is not None:
                length, block = left
                self.checkpoints.append((row, group, length - (request.num_computed - count), block))

    def blocks(self, row: int, group: int) -> list[int]:
        """The block ids of a row's request in a group."""
        request = self.request(row)
        assert request is not None
        return self.manager.rows(request.id)[group]

    def slots(self, row: int, group: int, positions: Sequence[int]) -> list[tuple[int, int]]:
        """Block and offset of positions of a row's request; (-1, -1) where the group has no slot mapping."""
        request = self.request(row)
        assert request is not None
        if self.config.topology.specs[group].one_block:
            return [(-1, -1)] * len(positions)
        blocks, size = self.manager.rows(request.id)[group], self.config.block_size(group)
        found = [(blocks[p // size] if p // size < len(blocks) else 0, p % size) for p in positions]
        return [slot if slot[0] else (-1, -1) for slot in found]

    def states(self, row: int, computed: int) -> list[int]:
        """Blocks that hold the state of a row's request after `computed` tokens, one a group; 0 for none."""
        request = self.request(row)
        assert request is not None
        found = []
        for group, spec in enumerate(self.config.topology.specs):
            blocks = self.manager.rows(request.id)[group]
            column = 0 if spec.one_block else (computed - 1) // self.config.block_size(group)
            there = computed > 0 and (spec.snapshot or spec.one_block) and column < len(blocks)
            found.append(blocks[column] if there else 0)
        return found
