"""The rules that every kind of layer follows unless its own file says otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from hkv.dialects.vllm.config import VllmConfig
from hkv.errors import ConfigError
from hkv.spec import LayerSpec
from reference.dialects.vllm.offers import Offer
from reference.dialects.vllm.registration import register_full
from reference.dialects.vllm.request import Request
from reference.dialects.vllm.retention import replay_boundaries
from reference.keys.views import Chain, block_keys
from reference.state.key_table import Key
from reference.state.pool import NULL, Pool


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


@dataclasses.dataclass
class GroupRow:
    """Row of one request in one group.

    Attributes:
      blocks: block ids; column i serves the tokens `[i, i + 1) * block_size`; 0 where no block is needed.
      registered: columns that were looked at for registration or came from a hit; None before either happened.
      partial: a column whose block is shared and only partly filled, with that block: it is copied before the request
        writes on. or None.
    """

    blocks: list[int] = dataclasses.field(default_factory=list)
    registered: int | None = None
    partial: tuple[int, int] | None = None


class Demand(NamedTuple):
    """Lengths up to which a request asks for slots. All counts are tokens from its start.

    Attributes:
      slots: wanted room, draft lookahead included.
      main: the same without the lookahead.
      total: computed already, hits and external tokens included.
      local: the same without external tokens.
      prefill_end: end of its prefill, or 0 when every step counts as the last of the prefill.
      whole: the question is whether the whole request could ever run, and blocks given back on the way count as
        reusable; nothing is about to be taken.
      encoder: tokens of an encoder's output that want slots, where queries read those.
    """

    slots: int
    main: int
    total: int
    local: int
    prefill_end: int
    whole: bool
    encoder: int = 0


class Kind:
    """One group of layers of one kind: its rows, and the rules by which they grow, are found, retire and are freed.

    vLLM 0.33 `SingleTypeKVCacheManager`.

    Attributes:
      droppable: whether the kind takes part in the EAGLE drop.
      fine_grained: whether hits may end inside a block.
      exact: whether `estimate` is always what is taken.
      group: index of the group.
      spec: cache description of its layers.
      block_size: tokens per block: the spec's, times the ranks that share it under context parallelism.
      alignment: tokens to which hits are aligned; hash blocks with sub-block hits, else scheduler blocks.
      eagle: whether the EAGLE drop applies; set by the coordinator.
      rows: by request.
      copies: pending copy-on-write copies, (source, target); each holds a reference to both.
      zeros: blocks handed out since the list was last drained, where new ones are to be zeroed.
      offers: states that a connector is to be offered, in the order in which they were registered or copied.
    """

    droppable: ClassVar[bool] = True
    fine_grained: ClassVar[bool] = False
    exact: ClassVar[bool] = True

    def __init__(self, group: int, spec: LayerSpec, config: VllmConfig, pool: Pool) -> None:
        self.group = group
        self.spec = spec
        self.config = config
        self.pool = pool
        self.block_size = config.block_size(group)
        self.hash_block_size = config.hash_block_size
        self.alignment = config.hash_block_size if config.partial_hits else config.scheduler_block_size
        self.eagle = False
        self.rows: dict[str, GroupRow] = {}
        self.copies: list[tuple[int, int]] = []
        self.zeros: list[int] = []
        self.offers: list[Offer] = []

    # What a kind's own file overrides.

    def new_row(self) -> GroupRow:
        """An empty row."""
        return GroupRow()

    def check(self, alone: bool) -> None:
        """Refuses a configuration in which hits end where the kind cannot resume. `alone`: it is the only group.

        Raises:
          ConfigError: names the group's field.
        """
        if self.eagle and not self.droppable:
            raise ConfigError(f"groups[{self.group}].eagle", True, f"no EAGLE drop for {self.spec.kind}")

    def skipped_tokens(self, n: int) -> int:
        """Leading tokens that computing token `n` no longer needs; may be negative for "none"."""
        return 0

    def skipped(self, n: int) -> range:
        """Columns whose blocks computing token `n` no longer needs: those before what it reads, but for the sinks'."""
        kept = ceil_div(self.spec.sinks, self.block_size)
        return range(kept, max(kept, self.skipped_tokens(n) // self.block_size))

    def admission_cap(self) -> int | None:
        """Most blocks a request can hold at once, or None when that grows with it."""
        return None

    def mask(self, span: range, boundaries: Sequence[int]) -> list[bool] | None:
        """Mask of the columns of `span` whose blocks are worth registering; None for all."""
        return None

    def wanted(self, row: GroupRow, span: range, boundaries: Sequence[int]) -> list[bool] | None:
        """Mask of the columns of `span` that are registered now that they are looked at; None for all."""
        return self.mask(span, boundaries)

    def find(
        self, keys: Sequence[Chain], max_length: int, groups: Sequence[int], drop: bool, alignment: int
    ) -> tuple[list[list[int]], int]:
        """The longest prefix from which this kind can resume, for several groups of one spec at once.

        Args:
          keys: the request's keys.
          max_length: tokens; the prefix is not longer.
          groups: a block counts only if every one of these groups has it.
          drop: give up the last block, which a draft module cannot trust.
          alignment: tokens; the prefix is a multiple of it.

        Returns:
          For each group, the row that the prefix would begin with, and the prefix's length in tokens.
        """
        raise NotImplementedError

    def concerning(self, demand: Demand) -> Demand:
        """The part of a demand that concerns this kind: all of it."""
        return demand

    # Admission.

    def admitted(self, id: str) -> bool:
        """True if the request came in by a hit, or had something registered."""
        row = self.rows.get(id)
        return row is not None and row.registered is not None

    def waits(self, hit: Sequence[int], demand: Demand) -> bool:
        """True if a hit needs what this very step writes, before it is written: then it waits for the next one."""
        return False

    def estimate(self, id: str, hit: Sequence[int], demand: Demand) -> int:
        """Blocks of the free queue that `demand` costs: new ones, and free blocks of the hit that leave the queue.

        vLLM 0.33 `get_num_blocks_to_allocate`.
        """
        wanted = ceil_div(demand.slots, self.block_size)
        if demand.whole and (cap := self.admission_cap()) is not None:
            wanted = min(wanted, cap)
        row = self.rows.get(id)
        have = len(row.blocks) if row is not None else 0
        if row is not None and row.registered is not None:
            return max(wanted - have, 0) + (row.partial is not None)
        skipped = self.skipped(demand.total)
        known = have + len(hit)
        new = max(0, wanted - max(known, skipped.stop if skipped else 0))
        if skipped:
            new += max(0, skipped.start - known)
        adopted = [block for column, block in enumerate(hit, have) if column not in skipped]
        copied = 1 if hit and demand.local % self.block_size else 0
        return new + self.evictable(adopted) + copied

    def refuse(self, id: str) -> None:
        """Notes that the request whose demand was estimated was not granted it."""

    def taken(self, id: str, hit: Sequence[int], demand: Demand, estimate: int) -> int:
        """Blocks of the free queue that granting `demand`, of which `estimate` was asked before, really takes."""
        return max(0, estimate)

    def evictable(self, hit: Sequence[int]) -> int:
        """Blocks of a hit that without references so far."""
        refs = self.pool.refs
        return sum(1 for block in hit if block != NULL and refs[block] == 0)

    # Growth.

    def adopt(self, id: str, hit: Sequence[int], local: int, external: int) -> None:
        """Begin a row with the blocks of a hit, null where they are no longer needed (`add_local_computed_blocks`).

        A row whose hit ends among the sinks is made longer by `adopt_external`.

        Args:
          id: a request that has no row.
          hit: this group's blocks of the hit.
          local: tokens of the hit.
          external: tokens that will arrive from elsewhere, after them.
        """
        skipped = self.skipped(local + external)
        blocks = [NULL if column in skipped else block for column, block in enumerate(hit)]
        self.pool.touch(blocks)
        if skipped and len(hit) >= skipped.start:
            blocks += [NULL] * (skipped.stop - len(hit))
        row = self.rows[id] = self.rows.get(id) or self.new_row()
        row.blocks = blocks
        row.registered = len(blocks)
        column = local // self.block_size
        if column < len(hit) and column not in skipped and local % self.block_size:
            row.partial = (column, hit[column])
            row.registered = column

    def adopt_external(self, id: str, local: int, external: int, written: bool = False) -> None:
        """Take blocks for tokens that come from elsewhere (vLLM 0.33 `allocate_external_computed_blocks`).

        First for those of the sinks that are not part of the hit, then for those of the last range that is read. Those
        that are `written` by a load later on are not to be zeroed.
        """
        total = local + external
        unread = self.skipped_tokens(total)
        if not self.spec.sinks and unread > 0 and min(total - unread, external) <= 0:
            return
        row, skipped = self.row(id), self.skipped(total)
        zeros = [] if written else self.zeros
        if skipped:
            row.blocks += self._take(max(0, skipped.start - len(row.blocks)), zeros)
            row.blocks += [NULL] * (skipped.stop - len(row.blocks))
        row.blocks += self._take(max(0, ceil_div(total, self.block_size) - len(row.blocks)), zeros)

    def allocate(self, id: str, slots: int, main: int) -> list[int]:
        """Grow a row to `slots` tokens and return the new blocks; a copy's target first.

        When the row ends in a shared, partly filled block, a new block takes its place and a copy is queued, before
        which the request must not write.
        """
        row = self.row(id)
        copied = [] if row.partial is None else [self.copy_on_write(row, self._take(1, self.zeros)[0])]
        missing = ceil_div(slots, self.block_size) - len(row.blocks)
        if missing <= 0:
            return copied
        new = self._take(missing, self.zeros)
        row.blocks += new
        return copied + new

    def _take(self, count: int, zeros: list[int]) -> list[int]:
        """Takes new blocks, which enter a list of those to be zeroed where the group's are."""
        blocks = self.pool.take(count, self.group)
        if self.config.zeroes(self.group):
            zeros += blocks
        return blocks

    def copy_on_write(self, row: GroupRow, target: int) -> int:
        """Put `target` in place of the row's shared block and queue the copy; the row's old reference goes to it."""
        assert row.partial is not None
        column, source = row.partial
        row.partial = None
        row.blocks[column] = target
        self.copies.append((source, target))
        self.pool.refs[target] += 1
        return target

    def row(self, id: str) -> GroupRow:
        """The row of a request, which comes into being if it has none."""
        row = self.rows.get(id)
        if row is None:
            row = self.rows[id] = self.new_row()
        return row

    # Registration.

    def register(self, request: Request, tokens: int) -> range:
        """Register the full blocks among the first `tokens` tokens that were not looked at yet (`cache_blocks`).

        A block that is null or masked out now is never looked at again.

        Returns:
          The columns that were looked at.
        """
        if not self.spec.prefix_cacheable:
            return range(0)
        row = self.row(request.id)
        done = row.registered or 0
        full = min(tokens, len(request.keys) * self.hash_block_size) // self.block_size
        if done >= full:
            return range(0)
        span = range(done, full)
        keys = block_keys(request.keys, self.hash_block_size, self.block_size)
        sparse = self.config.retention_interval is not None
        mask = self.wanted(row, span, self.boundaries(request) if sparse else ())
        register_full(self.pool, request, self.group, row.blocks, span, keys, self.block_size, mask)
        row.registered = full
        return span

    def boundaries(self, request: Request) -> tuple[int, ...]:
        """Lengths in tokens at which later requests should be able to resume: the prompt's end, the shared prefix."""
        config = self.config
        found = replay_boundaries(request.num_prompt, config.scheduler_block_size, config.uses_eagle)
        if request.shared_prefix:
            found += (request.shared_prefix,)
            if self.eagle and config.retains_below_shared_boundaries:
                found += (request.shared_prefix - self.block_size,)
        return found

    # The end.

    def retire(self, id: str, processed: int) -> None:
        """Give back blocks that no token from `processed` on needs, last first (vLLM 0.33 `remove_skipped_blocks`).

        Walks down and stops at the first null block, or at the sinks: everything between was given back earlier.
        """
        row = self.rows.get(id)
        if row is None:
            return
        blocks, skipped = row.blocks, self.skipped(processed)
        freed: list[int] = []
        for column in range(min(skipped.stop, len(blocks)) - 1, skipped.start - 1, -1):
            if blocks[column] == NULL:
                break
            freed.append(blocks[column])
            blocks[column] = NULL
        if freed:
            self.pool.release(freed)

    def free(self, id: str) -> None:
        """Give back the whole row, last block first."""
        row = self.rows.pop(id, None)
        if row is not None:
            self.pool.release(reversed(row.blocks))

    def take_tail(self, id: str) -> Offer | None:
        """The state at the end of a request's prompt, inside a block that nothing was copied from yet; none here."""

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies queued since they were last taken; the caller gives back their references."""
        copies, self.copies = self.copies, []
        return copies

    def new_step(self) -> None:
        """A scheduling step begins."""

    def forget(self, id: str) -> None:
        """A waiting request goes away."""
        self.rows.pop(id, None)

    def key_of(self, block: int) -> Key | None:
        """The primary key of a block."""
        return self.pool.primary[block]
