"""The smallest model whose every value names all that was read to compute it, served in pages that are Python's.

A recurrent layer's state is a hash of all tokens so far, and an attention layer's token is the hash of the prefix that
it ends. A state or token that stands in another block, or after another number of tokens, than its key or its row says
is another number. Pages that nobody holds and that no key leads to are forgotten, as anybody may write them next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import numpy as np

import hkv
from hkv.cache.cache import Cache
from hkv.cache.state import ERA, OWN_ERA, StepRequest
from hkv.dialects.vllm.kinds import layer
from hkv.state.status import Status
from reference.keys import fingerprint

R, P, T, W, BLOCKS = 3, 40, 26, 52, 40
"""Rows, tokens of the longest prompt, tokens of a row's longest chunk with its drafts, entries, blocks."""

WORDS, FACTOR = 1 << 32, 1_000_003
JUNK = -1
"""Content that a draft leaves in a page: no prefix hashes to it."""

Key = tuple[int, int, int, int]


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """A number for the tokens up to each end, 0 to all of them, in their order; 1 for none."""
    hashes = [1]
    for token in tokens:
        hashes.append((hashes[-1] * FACTOR + token + 7) % WORDS)
    return hashes


def prefix_hash(tokens: Sequence[int]) -> int:
    """The number for all of them."""
    return prefix_hashes(tokens)[-1]


class Served:
    """Rows of requests, and the pages in which the model keeps its states and tokens.

    `states` are by (group, block), `slots` by (group, block, offset). `named` has for each key of a prefix computed so
    far the hashes of the tokens up to each of its ends; `left` has the keys of states that chunks left behind inside
    them.
    """

    def __init__(self, config: hkv.VllmConfig) -> None:
        self.config, self.specs, self.sizes = config, config.topology.specs, config.block_sizes
        self._make()
        self.tokens: list[list[int]] = [[] for _ in range(R)]
        self.hits = [0] * R
        self.states: dict[tuple[int, int], int] = {}
        self.slots: dict[tuple[int, int, int], int] = {}
        self.named: dict[Key, list[int]] = {}
        self.left: set[Key] = set()
        self.seen: set[str] = set()

    def _make(self) -> None:
        self._cache: Cache = hkv.init(self.config, rows=R, row_blocks=W)

    @property
    def cache(self) -> Cache:
        """Blocks, rows and keys."""
        return self._cache

    def running(self, row: int) -> bool:
        """True if the row has a request."""
        return bool(np.asarray(self.cache.state.requests)[row, StepRequest.LIVE])

    # What requests do.

    def arrive(self, row: int, tokens: list[int], prompt: int | None = None) -> int:
        """A request begins, or comes again with what it generated after `prompt` tokens. Returns its hit."""
        padded = np.zeros((1, P), np.int32)
        padded[0, : len(tokens)] = tokens
        counts = np.array([len(tokens), len(tokens) if prompt is None else prompt], np.int32)
        found = self._arrive(np.array([row]), padded, counts[:1], counts[1:])
        assert found.status[0] == Status.OK
        self._begin(row, tokens, int(found.hits[0]))
        self.require()
        return self.hits[row]

    def _arrive(self, row: np.ndarray, padded: np.ndarray, counts: np.ndarray, prompts: np.ndarray):
        self._cache, found = hkv.arrive(self._cache, row, padded, counts, prompts=prompts)
        return found

    def _begin(self, row: int, tokens: list[int], hit: int) -> None:
        self.hits[row], self.tokens[row] = hit, tokens[:hit]
        found = self._keys(tokens)[: hit // self.config.hash_block_size]
        if found and found[-1] in self.left:
            self.seen.add("a hit on a state from inside a chunk")

    def free(self, row: int) -> None:
        """The row's request ends, or is preempted."""
        assert self._free(row) == Status.OK
        self.tokens[row] = []
        self.require()

    def _free(self, row: int) -> int:
        self._cache, status = hkv.free(self._cache, row)
        return int(status)

    def step(
        self,
        new: list[list[int]],
        drafts: Sequence[Sequence[int]] = ((),) * R,
        in_flight: Sequence[int] = (0,) * R,
        order: Sequence[int] = range(R),
    ) -> list[int]:
        """Computes with the model what the cache grants; every value that it reads must be the row's own; its statuses.

        Tokens and `drafts` behind them are by row, `in_flight` are those whose steps have not come back; rows are
        served in `order`.
        """
        asked, batch = ragged(new, drafts, in_flight, order)
        result, tables = self._step(batch)
        require_nothing_else(result, batch[1])
        for query, row in enumerate(order):
            if asked[row] and result.status[query] == Status.OK:
                self._take(row, new[row], result, query, batch[1], tables[row])
        self.require()
        return [int(result.status[list(order).index(row)]) for row in range(R)]

    def _step(self, batch):
        """The cache's step, with the copies that it asks for, and its tables afterwards."""
        held = self._held()
        self._cache, result = hkv.step(self._cache, *batch)
        result, tables = jax.device_get((result, self._cache.tables))
        self._forget(self._held() - held)
        self._copy([] if result.copies is None else result.copies)
        return result, tables

    def _take(self, row: int, chunk: list[int], result, query: int, ends, table) -> None:
        """Computes a query that was granted."""
        span = slice(ends[query], ends[query + 1])
        left = None if result.checkpoints is None else result.checkpoints[query]
        places = result.blocks[:, span], result.offsets[:, span]
        self._compute(row, chunk, result.reads[query], result.writes[query], left, places, table)

    def allocate(self, row: int, tokens: list[int], begins: bool) -> int:
        """One row's next tokens; of an empty row a prompt, after its hit. Returns the status."""
        padded = np.zeros(P, np.int32)
        padded[: len(tokens)] = tokens
        held = self._held()
        self._cache, found = hkv.allocate(self._cache, row, padded, len(tokens))
        found, table = jax.device_get((found, self._cache.tables[row]))
        if found.status != Status.OK:
            return int(found.status)
        if begins:  # blocks that it found are new in the tables, and those that it took may be forgotten nowhere
            self._begin(row, tokens, int(found.hit))
        else:
            self._forget(self._held() - held)
        self._copy([] if found.copies is None else found.copies[None])
        chunk = tokens[self.hits[row] :] if begins else tokens
        places = found.blocks[:, : len(chunk)], found.offsets[:, : len(chunk)]
        self._compute(row, chunk, found.reads, found.writes, found.checkpoints, places, table)
        self.require()
        return int(found.status)

    # What the model does.

    def _copy(self, copies) -> None:
        """Makes a step's copies: of states, and of as many slots as there are of each block."""
        for pairs in copies:
            for group, (block, copy) in enumerate(pairs.tolist()):
                self._forget({copy})
                if (group, block) in self.states:
                    self.states[group, copy] = self.states[group, block]
                for offset in range(self.sizes[group]):
                    if (group, block, offset) in self.slots:
                        self.slots[group, copy, offset] = self.slots[group, block, offset]

    def _compute(self, row: int, chunk: list[int], reads, writes, left, places, table) -> None:
        before, after = len(self.tokens[row]), [*self.tokens[row], *chunk]
        self._name(after)
        hashes, blocks = prefix_hashes(after), places[0]
        for group, spec in enumerate(self.specs):
            if spec.snapshot or spec.one_block:
                read, write = int(reads[group]), int(writes[group])
                state = self.states.get((group, read)) if read else 1
                # An opaque region is never shared: what a hit passes over, it has not seen.
                assert state == prefix_hash(after[self.hits[row] if spec.one_block else 0 : before])
                for draft in self._draft_states(group, len(after), table):
                    assert draft not in (read, write)
                    self.states[group, draft] = JUNK
                if left is not None and left[group, 1] >= 0:
                    self._leave(after, group, before, *left[group].tolist(), (read, write))
                for token in chunk:
                    state = (state * FACTOR + token + 7) % WORDS
                self.states[group, write] = state
                continue
            for place in range(blocks.shape[1]):
                slot = (group, int(blocks[group, place]), int(places[1][group, place]))
                self.slots[slot] = hashes[before + place + 1] if place < len(chunk) else JUNK
        self.tokens[row] = after

    def _leave(
        self, after: list[int], group: int, before: int, tokens: int, block: int, others: tuple[int, int]
    ) -> None:
        """The chunk's state after so many of its tokens, where a kernel can stop, in a block that is nobody else's."""
        end = before + tokens
        assert before < end < len(after)
        assert tokens % layer(self.specs[group]).checkpoint_alignment == 0
        assert block not in others
        self.states[group, block] = prefix_hash(after[:end])
        self._note_left(after, end)

    def _note_left(self, tokens: list[int], end: int) -> None:
        self.left.update(
            self._keys(tokens)[end // self.config.hash_block_size - 1 : end // self.config.hash_block_size]
        )
        self.seen.add("a state inside a chunk")

    def _draft_states(self, group: int, computed: int, table) -> list[int]:
        """The blocks of a row's states for drafts: those behind its running state."""
        spec = self.specs[group]
        scratch = getattr(spec, "num_speculative_blocks", 0)
        running = (computed - 1) // self.sizes[group]
        blocks = table[group][running + 1 : running + 1 + scratch].tolist()
        assert all(blocks)
        return blocks

    def _held(self) -> set[int]:
        return set(np.unique(self.cache.tables).tolist()) - {0}

    def _forget(self, blocks: set[int]) -> None:
        self.states = {at: state for at, state in self.states.items() if at[1] not in blocks}
        self.slots = {at: token for at, token in self.slots.items() if at[1] not in blocks}

    # What must hold.

    def require(self) -> None:
        """Every block that a key leads to holds what its key names, and every row's own what the row goes on from."""
        state, tables = jax.device_get((self.cache.state, self.cache.tables))
        self._forget(set(np.flatnonzero(state.refs == 0).tolist()))
        for block, group, key in registered(state):
            assert key in self.named
            spec, size, hashes = self.specs[group], self.sizes[group], self.named[key]
            end = len(hashes) - 1
            if spec.snapshot:
                assert self.states.get((group, block)) == hashes[end]
                continue
            for position in range((end - 1) // size * size, end):
                assert self.slots.get((group, block, position % size)) == hashes[position + 1]
        for row in range(R):
            if self.tokens[row]:
                self._require_row(row, tables[row])

    def _require_row(self, row: int, table: np.ndarray) -> None:
        computed, hashes = len(self.tokens[row]), prefix_hashes(self.tokens[row])
        for group, spec in enumerate(self.specs):
            size = self.sizes[group]
            if spec.snapshot:
                assert self.states.get((group, int(table[group, (computed - 1) // size]))) == hashes[computed]
            for span in () if spec.snapshot or spec.one_block else spec.reads(computed):
                for position in span:
                    slot = (group, int(table[group, position // size]), position % size)
                    assert self.slots.get(slot) == hashes[position + 1]

    # Keys.

    def _keys(self, tokens: Sequence[int]) -> list[Key]:
        size, ahead = self.config.hash_block_size, self.config.hash_lookahead
        ends = range(size, len(tokens) - ahead + 1, size)
        blocks = np.array(tokens[: len(ends) * size], np.int64).reshape(-1, size)
        links = [tuple(link) for link in fingerprint.keys(blocks).tolist()]
        return [fingerprint.ahead(link, tokens[end : end + ahead]) for link, end in zip(links, ends, strict=True)]

    def _name(self, tokens: list[int]) -> None:
        """Notes the keys of prefixes that end where hash blocks do."""
        size, hashes = self.config.hash_block_size, prefix_hashes(tokens)
        for number, key in enumerate(self._keys(tokens)):
            self.named[key] = hashes[: (number + 1) * size + 1]


def ragged(
    new: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]], in_flight: Sequence[int], order: Sequence[int]
) -> tuple[list[list[int]], tuple[np.ndarray, ...]]:
    """Every row's tokens and drafts, and the arguments of a step that serves the rows in that order."""
    asked = [[*chunk, *draft] if chunk else [] for chunk, draft in zip(new, drafts, strict=True)]
    flat = np.array([token for row in order for token in asked[row]], np.int32)
    ends = np.cumsum([0, *(len(asked[row]) for row in order)])
    drafted = np.array([len(asked[row]) - len(new[row]) for row in order])
    flying = np.array([in_flight[row] for row in order])
    return asked, (np.pad(flat, (0, R * T - len(flat))), ends, np.array(order), drafted, flying)


def require_nothing_else(result, ends: np.ndarray) -> None:
    """Queries that are refused, or have no tokens, are told of nothing to write: not of slots, states or copies."""
    for query, status in enumerate(result.status.tolist()):
        if status == Status.OK and ends[query] < ends[query + 1]:
            continue
        span = slice(ends[query], ends[query + 1])
        told = [result.writes[query], result.blocks[:, span], result.checkpoints, result.copies]
        told[2:] = [pairs[query] for pairs in told[2:] if pairs is not None]
        assert all((places == -1).all() for places in told)


def registered(state) -> Iterator[tuple[int, int, Key]]:
    """Every block that a key leads to, with the key's group and the key; a block may have several."""
    blocks, keys = len(state.refs), state.keys.tolist()
    for entry, words in enumerate(keys):
        block = entry % blocks
        of_this_era = len(keys) == blocks or words[ERA] == keys[block][OWN_ERA]
        if state.refs[block] % 2 and of_this_era:
            yield block, words[4], tuple(words[:4])
