"""Linear attention and Mamba: a hit needs one state, the one at exactly its length.

In `align` mode, which prefix caching uses, a row is indexed by position: column p holds the state after
`(p + 1) * block_size` tokens, or the running state in the last column; columns between the ends of chunks are null. The
last `num_speculative_blocks` columns are scratch states, one a draft token. Without caching, in `none` mode, the row is
an ordinary one with that many blocks more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import EngineFailure
from hkv.spec import Mamba
from reference.dialects.vllm.kinds.checkpoints import checkpoint_position, checkpoint_possible
from reference.dialects.vllm.kinds.kind import Demand, GroupRow, Kind, ceil_div
from reference.dialects.vllm.offers import Offer
from reference.dialects.vllm.registration import register_partial
from reference.dialects.vllm.request import Request
from reference.dialects.vllm.retention import snapshot_mask
from reference.keys.views import Chain, block_keys
from reference.state.key_table import Key
from reference.state.pool import NULL, Pool


@dataclasses.dataclass
class MambaRow(GroupRow):
    """A row of states, with what its owner remembers between steps.

    Attributes:
      grown: whether the request was given blocks of its own, so that its row ends in a running state and scratch.
      retired: leading columns already given back.
      checkpoint: a length in tokens and the column in which the state at that length will be exported, or None.
      begun: column inside which the chunk with that checkpoint begins, whose state it leaves as it was, or None.
      standing: columns not looked at yet whose blocks hold such a checkpoint, or the state that its chunk began from.
      tail: the state at the end of its prompt that it registered inside a block, until that is copied or offered.
    """

    grown: bool = False
    retired: int = 0
    checkpoint: tuple[int, int] | None = None
    begun: int | None = None
    standing: set[int] = dataclasses.field(default_factory=set)
    tail: Offer | None = None


def _begun_by(row: MambaRow) -> set[int]:
    """The column that the chunk at hand began inside and leaves as it was, if it leaves a checkpoint further on."""
    return set() if row.checkpoint is None or row.begun is None else {row.begun}


class MambaKind(Kind):
    """vLLM 0.33 `MambaManager`.

    Attributes:
      aligned: `align` mode; else `none`.
      scratch: states for draft tokens at the end of a row.
      new_keys: keys registered in this step. Their states are written only when the step has run, so that a request
        whose hit ends in one has to wait for the next step.
    """

    fine_grained: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    spec: Mamba

    def __init__(self, group: int, spec: Mamba, config: VllmConfig, pool: Pool) -> None:
        super().__init__(group, spec, config, pool)
        self.aligned = spec.cache_mode == "align"
        self.scratch = spec.num_speculative_blocks
        self.new_keys: set[Key] = set()

    def new_row(self) -> MambaRow:
        return MambaRow()

    def row(self, id: str) -> MambaRow:
        row = super().row(id)
        assert isinstance(row, MambaRow)
        return row

    def skipped_tokens(self, n: int) -> int:
        """All but the last: its state stands for them. -1 for an empty request."""
        return n - 1

    def mask(self, span: range, boundaries: Sequence[int]) -> list[bool] | None:
        interval = self.config.retention_interval
        if interval is None:
            return None
        return snapshot_mask(span, interval, boundaries, self.block_size, self.alignment)

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """The longest length at which a state is known; null in every column but its own. The EAGLE drop is ignored."""
        size = self.block_size
        if alignment < size and size % alignment == 0:
            unit, candidates = alignment, keys
        else:
            unit, candidates = size, block_keys(keys, self.hash_block_size, size)
        limit = max_length // unit
        if "finder-index-error" not in self.config.bugs or unit != size:
            limit = min(limit, len(candidates))
        for last in range(limit - 1, -1, -1):
            chain = candidates[last]
            if (last + 1) * unit % alignment:
                continue
            found = self.pool.find(chain, groups)
            if found is not None:
                column = last * unit // size
                return [[NULL] * column + [block] for block in found], (last + 1) * unit
        return [[] for _ in groups], 0

    # Admission.

    def waits(self, hit: Sequence[int], demand: Demand) -> bool:
        """True if a hit ends in a state of this very step."""
        return len(hit) > 0 and self.key_of(hit[-1]) in self.new_keys

    def estimate(self, id: str, hit: Sequence[int], demand: Demand) -> int:
        """Estimate as of every kind in `none` mode. In `align` mode a step takes few blocks, however long it is.

        One running state, the scratch of a request that has none yet, a checkpoint, a copy. The engine's own
        number: it may be too small (see `taken`) or negative.
        vLLM 0.33 `MambaManager.get_num_blocks_to_allocate`, which also plans the chunk's checkpoint.
        """
        if not self.aligned:
            room = self.spec.block_size * self.scratch
            return super().estimate(id, hit, demand._replace(slots=demand.slots + room))
        row = self.row(id)
        new = ceil_div(demand.main, self.block_size) + self.scratch - len(hit) - len(row.blocks)
        copied = self._copies(row, hit, demand)
        if copied:
            new = max(new, 0) + 1
        position = self._planned_checkpoint(row, demand)
        if not demand.whole:
            self._leave_checkpoint(row)
            row.checkpoint = (position, ceil_div(demand.main, self.block_size) - 2) if position else None
            row.begun = self._begun(demand.total) if position else None
        if new > 0:
            new = min(new, 1 + copied + (1 if position else 0) + (0 if row.grown else self.scratch))
        return new + self.evictable(hit)

    def _leave_checkpoint(self, row: MambaRow) -> None:
        """Notes the last chunk's columns that hold other states, if they are only looked at now that others follow.

        Keys lag behind tokens, and steps on their way retire nothing: a checkpoint may still stand when its column's
        end has one.
        """
        if row.checkpoint is None:
            return
        found = _begun_by(row)
        if "checkpoint-under-later-key" not in self.config.bugs:
            found.add(row.checkpoint[1])
        row.standing |= {column for column in found if column >= (row.registered or 0)}

    def _begun(self, start: int) -> int | None:
        """The column inside which a chunk begins that will leave a checkpoint further on, and so goes on behind it."""
        if start % self.block_size == 0 or "begun-state-under-later-key" in self.config.bugs:
            return None
        return start // self.block_size

    def refuse(self, id: str) -> None:
        """The chunk will not be computed, nor the state inside it that was planned."""
        row = self.rows.get(id)
        if isinstance(row, MambaRow) and "plan-outlives-refusal" not in self.config.bugs:
            row.checkpoint = None

    def _copies(self, row: MambaRow, hit: Sequence[int], demand: Demand) -> int:
        """1 when a partly filled state has to be copied before the request writes on, else 0."""
        return int(row.partial is not None or (len(hit) > 0 and demand.local % self.block_size != 0))

    def _planned_checkpoint(self, row: MambaRow, demand: Demand) -> int:
        """The length at which this chunk exports a state for later requests, or 0."""
        spec = self.spec
        start, end = demand.total, demand.main
        if spec.num_prefill_checkpoint_blocks == 0 or end < demand.prefill_end:
            return 0
        position = self._checkpoint_of(end, self.alignment)
        possible = checkpoint_possible(
            start, end, position, self.hash_block_size, self.block_size, spec.prefill_checkpoint_alignment
        )
        column = ceil_div(end, self.block_size) - 2
        if not possible or column < 0:
            return 0
        blocks = row.blocks
        is_free = column >= len(blocks) or blocks[column] == NULL
        is_scratch = row.grown and column >= len(blocks) - self.scratch
        return position if is_free or is_scratch else 0

    def _checkpoint_of(self, tokens: int, granularity: int) -> int:
        return checkpoint_position(tokens, granularity, self.config.eagle, self.config.hash_lookahead)

    def taken(self, id: str, hit: Sequence[int], demand: Demand, estimate: int) -> int:
        """Exactly what granting `demand` takes. The estimate may be less, and vLLM 0.33 then fails halfway.

        It leaves out the state for external tokens, and after rejected drafts it may be negative, as though blocks came
        back.
        """
        row = self.rows.get(id)
        if not self.aligned or not isinstance(row, MambaRow):
            return max(0, estimate)
        external, kept, length = 0, hit, len(row.blocks) or len(hit)
        if row.registered is None and demand.total > demand.local:
            start = max(0, self.skipped_tokens(demand.total) // self.block_size)
            kept = hit[start:]
            length = max(start, len(hit))
            external = max(0, ceil_div(demand.total, self.block_size) - length)
        copied = self._copies(row, kept, demand)
        grown = self._length_before_new(length + external, row, demand.main)
        new = max(0, ceil_div(demand.main, self.block_size) + self.scratch - grown) + copied
        exact = external + new + self.evictable(kept)
        bug = "external-state-not-counted" if external else "negative-estimate"
        return estimate if bug in self.config.bugs else exact

    def _length_before_new(self, length: int, row: MambaRow, main: int) -> int:
        """Length of a row of `length` columns once null columns are added and scratch is moved, before new blocks."""
        running = ceil_div(main, self.block_size) - 1
        stop = running - (0 if row.checkpoint is None else 1)
        padded = max(length, stop) if length < running else length
        moved = max(0, min(length, stop) - max(0, length - self.scratch)) if row.grown else 0
        return padded + moved

    # Growth.

    def allocate(self, id: str, slots: int, main: int) -> list[int]:
        """Grow a row to `main` tokens; drafts live in scratch. Returns every column from the old end on.

        The running state moves to the column of `main`; columns passed over are null; scratch moves along; one column
        may take the planned checkpoint. When the row's last state is also a cached, partly filled one, it is copied
        first: a hit goes on in the copy, the owner goes on in place and leaves the copy to the cache.
        vLLM 0.33 `MambaManager.allocate_new_blocks`.
        """
        if not self.aligned:
            return super().allocate(id, slots + self.spec.block_size * self.scratch, main)
        row = self.row(id)
        blocks = row.blocks
        wanted = ceil_div(main, self.block_size) + self.scratch
        if wanted <= len(blocks) and row.partial is None and row.checkpoint is None:
            row.grown = True
            return []
        old_end = len(blocks)
        self._pass_over_columns(row, wanted - self.scratch - 1)
        new = self.pool.take(max(wanted - len(blocks), 0) + (0 if row.partial is None else 1), self.group)
        answer = blocks[old_end:]
        if row.partial is not None:
            copy, *new = new
            if row.grown:
                self._leave_copy_to_cache(row, copy)
            else:
                answer = [self.copy_on_write(row, copy), *answer]
        blocks += new
        row.grown = True
        return answer + new

    def _pass_over_columns(self, row: MambaRow, running: int) -> None:
        """Null columns up to the running state's (a planned checkpoint's left out), and scratch moved behind them."""
        blocks = row.blocks
        old_end = len(blocks)
        stop = running - (0 if row.checkpoint is None else 1)
        if old_end < running:
            blocks += [NULL] * (stop - old_end)
        if row.grown:
            for column in range(old_end - self.scratch, min(old_end, stop)):
                assert self.pool.writable(blocks[column]), "scratch belongs to one request alone"
                blocks.append(blocks[column])
                blocks[column] = NULL

    def _leave_copy_to_cache(self, row: MambaRow, copy: int) -> None:
        """The owner writes on in its block; the copy takes over the block's keys, and is filled before that."""
        assert row.partial is not None
        column, source = row.partial
        if row.blocks[column] != source:
            raise EngineFailure("partial", source, f"the state of column {column}, which was given back")
        row.partial = None
        self.pool.move_keys(source, copy)
        self.copies.append((source, copy))
        self.pool.refs[source] += 1
        if (key := self.key_of(copy)) is not None:
            self.new_keys.add(key)
        if row.tail is not None:
            self.offers.append(row.tail._replace(block=copy))
            row.tail = None

    # Registration.

    def wanted(self, row: GroupRow, span: range, boundaries: Sequence[int]) -> list[bool] | None:
        assert isinstance(row, MambaRow)
        mask = self.mask(span, boundaries)
        other = row.standing | _begun_by(row)
        if other.isdisjoint(span):
            return mask
        kept = mask or [True] * len(span)
        row.standing.difference_update(span)
        return [keep and column not in other for column, keep in zip(span, kept, strict=True)]

    def register(self, request: Request, tokens: int) -> range:
        """Full columns, then one off the grid: a planned checkpoint, or the prompt's last state (`cache_blocks`)."""
        row = self.row(request.id)
        span = super().register(request, tokens)
        if self.aligned:
            key = self._register_tail(row, request, tokens)
            if key is not None:
                self.new_keys.add(key)
        for block in row.blocks[span.start : span.stop]:
            if (key := self.key_of(block)) is not None:
                self.new_keys.add(key)
                if self.config.offers(self.group):
                    self.offers.append(Offer(request.id, block, self.pool.covered[block], key))
        return span

    def _register_tail(self, row: MambaRow, request: Request, tokens: int) -> Key | None:
        if row.checkpoint is not None:
            return self._register_checkpoint(row, request, *row.checkpoint)
        if tokens <= 0 or tokens % self.hash_block_size:
            return None
        at_prompt_end = tokens == self._checkpoint_of(request.num_prompt, self.hash_block_size)
        if not at_prompt_end and not self._at_shared_boundary(request, tokens):
            return None
        column = ceil_div(tokens, self.block_size) - 1
        if column >= len(row.blocks) or row.blocks[column] == NULL:
            return None
        block = row.blocks[column]
        if self.pool.covered[block] == tokens and not self.config.registers_tails_again:
            return None
        key = register_partial(self.pool, request, self.group, block, tokens, self.hash_block_size)
        if tokens % self.block_size:
            row.partial = (column, block)
            row.registered = column
            row.tail = Offer(request.id, block, tokens, key) if self.config.offers(self.group) else None
        return key

    def _at_shared_boundary(self, request: Request, tokens: int) -> bool:
        """True if the prompt's chunk being computed ends where other requests were seen to branch off."""
        config = self.config
        if not (config.shared_prefix_checkpoint and config.partial_hits and config.prefill_lookahead <= 1):
            return False
        if not (config.uses_eagle or config.topology.eagle_groups):
            return False
        return tokens == request.shared_prefix and request.num_computed < tokens <= request.num_prompt

    def _register_checkpoint(self, row: MambaRow, request: Request, position: int, column: int) -> Key | None:
        """Register the exported state at `position` if a request can resume there; else its block must not be found."""
        if column >= len(row.blocks):
            raise EngineFailure("checkpoint", position, f"a state in one of the row's {len(row.blocks)} columns")
        block = row.blocks[column]
        retained = False
        if position % self.block_size == 0:
            end = position // self.block_size
            mask = self.mask(range(end - 1, end), ())
            retained = mask is None or mask[0]
        at_prompt_end = position == self._checkpoint_of(request.num_prompt, self.alignment)
        if not at_prompt_end and not retained and position != request.shared_prefix:
            self.pool.drop_keys(block)
            return None
        if self.pool.covered[block] == position:
            return None
        if position > len(request.keys) * self.hash_block_size:
            if "checkpoint-beyond-keys" in self.config.bugs:
                expected = f"at most the {len(request.keys) * self.hash_block_size} tokens that have keys"
                raise EngineFailure("checkpoint", position, expected)
            return None
        return register_partial(self.pool, request, self.group, block, position, self.hash_block_size, replace=True)

    # The end.

    def retire(self, id: str, processed: int) -> None:
        """Gives back every state before the one that token `processed` continues from, through null columns.

        vLLM 0.33 also remembers the column of the last running state; it always lies within what is walked here.
        """
        if not self.aligned:
            super().retire(id, processed)
            return
        if id not in self.rows:
            return
        row = self.row(id)
        blocks = row.blocks
        end = min(self.skipped_tokens(processed) // self.block_size, len(blocks))
        if end > row.retired:
            freed = [block for block in reversed(blocks[row.retired : end]) if block != NULL]
            blocks[row.retired : end] = [NULL] * (end - row.retired)
            self.pool.release(freed)
            row.retired = end
        gone = row.partial is not None and blocks[row.partial[0]] == NULL
        if gone and "tail-key-outlives-state" not in self.config.bugs:
            row.partial = None

    def take_tail(self, id: str) -> Offer | None:
        """The state at the end of the request's prompt (vLLM 0.33 `finalize_partial_tail_offload`); taken once."""
        row = self.rows.get(id)
        if not isinstance(row, MambaRow):
            return None
        tail, row.tail = row.tail, None
        return tail

    def free(self, id: str) -> None:
        self._withdraw(id)
        super().free(id)

    def forget(self, id: str) -> None:
        self._withdraw(id)
        super().forget(id)

    def _withdraw(self, id: str) -> None:
        """Nothing of a request is offered once it ends (vLLM 0.33 `pop_blocks_for_free`)."""
        self.offers = [offer for offer in self.offers if offer.id != id]

    def new_step(self) -> None:
        self.new_keys.clear()
