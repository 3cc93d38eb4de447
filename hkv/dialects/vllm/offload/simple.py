"""The text of vLLM's scheduler with the simpler second tier, run plainly."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.offload.orders import Orders, TransferJob
from hkv.dialects.vllm.offload.scheduler import CACHE, Scheduler, Served
from hkv.dialects.vllm.plain import columns_of, empty, endless, take_rows
from hkv.errors import OperationError
from reference.dialects.vllm.offload.copies import Copies, Saved
from reference.dialects.vllm.offload.lives import Ask, Live
from reference.dialects.vllm.offload.simple import Simple
from reference.dialects.vllm.pool import primary
from reference.language import Layout

LAYOUT = Layout(Simple)
"""Names and places of the state of a scheduler with the simpler tier."""


class SimpleScheduler(Scheduler):
    """A scheduler with `SimpleCPUOffloadConnector`. Jobs have numbers from 0 on, of the text from 1 on.

    Attributes:
      jobs: those that go on, by number.
    """

    def __init__(self, config: OffloadConfig) -> None:
        super().__init__(config, LAYOUT, **{"told_of.rows.counts": len(config.chunk_tokens)})
        made, partial = self.serving, config.cache.partial_hits and not config.lazy
        tier = self._tier = dataclasses.replace(config.cache, num_blocks=config.num_chunks, partial_hits=partial)
        made.tier = endless(empty(tier, keys=16, requests=1, tokens=64, events=False, explains=False))
        specs, choices = config.cache.topology.specs, made.choices
        choices.lazy, choices.near, choices.workers = int(config.lazy), config.near_eviction, config.workers
        choices.full = 1 + next(group for group, spec in enumerate(specs) if spec.reads_all)
        choices.partial = int(partial)
        for name in ("lazy_walk_goes_on", "lazy_store_renews"):
            setattr(choices, name, int(name.replace("_", "-") in config.bugs))
        made.loads.ends = made.pins.ends = made.saved[1]
        for ring in (made.loads, made.pins):
            ring.newer[ring.ends] = ring.older[ring.ends] = ring.ends
        self.jobs: dict[int, Copies] = {}
        self._places: dict[Copies, int] = {}
        self._prefixes: dict[bytes, int] = {}
        self._known: dict[str, Saved] = {}
        self._pair_entries()
        self._take_slots()

    # What can be seen.

    def saved(self) -> dict[str, tuple[Served, list[list[int]], list[int], list[int]]]:
        """Requests of which stores are made: of each group their blocks as steps told them and the block from which on
        it stores, and jobs."""
        numbers, width = self.serving.numbers_of, self.serving.cache.config.width
        found = {}
        for id, saved in self._known.items():
            blocks = [
                [numbers[saved.blocks[column * width + at]] for column in range(saved.held[at])] for at in range(width)
            ]
            jobs = [number for number, made in self.jobs.items() if saved in _owners(made)]
            found[id] = (self._served[saved.live], blocks, saved.cursors[:width], sorted(jobs))
        return found

    def reading(self) -> dict[int, list[int]]:
        """Blocks of the GPU that stores read; of a lazy tier with the job that does."""
        serving = self.serving
        if not self.config.lazy:
            return {number: [] for number, block in enumerate(serving.cache.blocks) if serving.reading[block]}
        stores = {pair.gpu: job for job, made in self.jobs.items() if made.writes for pair in _pairs(made)}
        return dict(sorted((serving.numbers_of[block], [job]) for block, job in stores.items()))

    def tier_blocks(self) -> Iterator[tuple[bytes, int, int, int]]:
        """Keys of the tier's blocks, their groups, the blocks and their references."""
        tier, width = self.serving.tier, self.serving.tier.config.width
        names, numbers = list(self._prefixes), {entry: at for at, entry in enumerate(tier.entries)}
        for number, block in enumerate(tier.blocks[1:-1], 1):
            first = primary(tier, block)
            entries = [first, *(entry for entry in block.known if entry is not first)]
            for entry in entries:
                if entry is not None:
                    place, group = divmod(numbers[entry] - 1, width)
                    yield names[place], group, number, block.refs

    def tier_free(self) -> list[int]:
        """The tier's free queue."""
        tier = self.serving.tier
        numbers, found, block = {each: at for at, each in enumerate(tier.blocks)}, list[int](), tier.free.oldest()
        while block is not tier.free.ends:
            found.append(numbers[block])
            block = tier.free.newer[block]
        return found

    # The tier.

    def _knows(self, id: str) -> bool:
        return id in self._known

    def _take(self, served: Served, tokens: int) -> list[int]:
        serving = self.serving
        numbers = [self._prefixes.setdefault(key, len(self._prefixes)) for key in served.all_keys]
        wanted = len(self._prefixes) * serving.cache.config.width + 1 - len(serving.cache.entries)
        if wanted > 0:
            for cache in (serving.cache, serving.tier):
                CACHE.grow(cache, "entries", max(wanted, len(cache.entries)))
            self._pair_entries()
        columns = columns_of(self.config.cache, tokens)
        for saved in serving.saved[1:]:
            saved.blocks += [None] * (columns * serving.cache.config.width - len(saved.blocks))
        return numbers

    def _pair_entries(self) -> None:
        """Notes the tier's entry of each of the GPU's."""
        serving = self.serving
        serving.twin.update(zip(serving.cache.entries[1:], serving.tier.entries[1:], strict=True))

    def _take_slots(self) -> None:
        super()._take_slots()
        serving, width = self.serving, self.serving.cache.config.width
        lacking = serving.cache.slots - serving.tier.slots
        if lacking > 0:
            CACHE.grow(serving.tier, "rows", lacking * width)
            CACHE.grow(serving.tier, "requests", lacking)
            take_rows(serving.tier)
        LAYOUT.grow(serving, "saved", serving.cache.slots + 2 - len(serving.saved))
        for saved in serving.saved[1:]:
            for line in (saved.held, saved.cursors, saved.passed):
                line += [0] * (width - len(line))

    def _hold(self, tokens: int) -> None:
        super()._hold(tokens)
        self._widen(self.serving.tier)

    def _make_room(self, lives: Sequence[Live]) -> None:
        serving, width = self.serving, self.serving.cache.config.width
        pairs = (columns_of(self.config.cache, self._tokens) + 2) * width * (len(lives) + 1)
        for table, first, link, wanted in (
            ("copies", "vacant_copies", "after", 2 * len(lives) + 3),
            ("pairs", "vacant_pair", "next", pairs + self._tier.num_blocks),
            ("owners", "vacant_owner", "next", len(lives) + 1),
        ):
            count, record = 0, getattr(serving, first)
            while record is not None and count < wanted:
                count, record = count + 1, getattr(record, link)
            if count < wanted:
                LAYOUT.grow(serving, table, wanted)
                for record in getattr(serving, table)[-wanted:]:
                    setattr(record, link, getattr(serving, first))
                    setattr(serving, first, record)
        serving.most_copies = len(serving.copies) - 1
        for place in range(len(self._places) + 1, len(serving.copies)):
            self._places[serving.copies[place]] = place
        self._make_mail(lives, lambda table, count: LAYOUT.grow(serving, f"told_of.{table}", count))

    def _orders(self, looked: Sequence[Live]) -> Orders:
        serving = self.serving
        flushed = set(self.jobs) if serving.flushes else set[int]()
        for live in (*(live for live in self._queue(serving.running) if not live.looked), *looked):
            saved = serving.saved[live.slot + 2]
            if saved.known:
                self._known.setdefault(self._name(live), saved)
        loads = [(saved.load, saved) for saved in serving.saved[1:] if saved.load is not None]
        loads = sorted(
            ((made, saved) for made, saved in loads if made.number > serving.before), key=lambda each: each[0].number
        )
        stores = [self._transfer(serving.store, "")] if serving.store is not None else []
        return Orders([self._transfer(made, self._name(saved.live)) for made, saved in loads], stores, flushed)

    def _transfer(self, made: Copies, id: str) -> TransferJob:
        tier = {block: number for number, block in enumerate(self.serving.tier.blocks)}
        pairs = list(_pairs(made))
        self.jobs[made.number - 1] = made
        blocks = [self.serving.numbers_of[pair.gpu] for pair in pairs]
        return TransferJob(made.number - 1, id, [tier[pair.tier] for pair in pairs], blocks, [], [])

    def _take_reports(self, reports: Mapping[int, int], received: Sequence[str]) -> None:
        for number in reports:
            if number >= self.serving.number:
                raise OperationError("job", number, f"below {self.serving.number}, the next one")
        for id in sorted(received):
            self._ask(Ask.LOADED, self.requests[id].live)
        for number, workers in reports.items():
            if number in self.jobs and self.jobs[number].number == number + 1:
                self._ask(Ask.REPORT, None, self._places[self.jobs[number]], workers)

    def _clear(self) -> None:
        self.jobs = {number: made for number, made in self.jobs.items() if made.number == number + 1}
        self._known = {id: saved for id, saved in self._known.items() if saved.known}
        super()._clear()

    def _emptied(self) -> None:
        """Nothing of the tier is kept beside the text."""


def _pairs(made: Copies) -> Iterator[Any]:
    pair = made.first
    while pair is not None:
        yield pair
        pair = pair.next


def _owners(made: Copies) -> list[Saved]:
    found, owner = list[Saved](), made.owners
    while owner is not None:
        found.append(owner.saved)
        owner = owner.next
    return found
