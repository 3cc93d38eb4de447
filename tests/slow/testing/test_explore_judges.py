"""The judges in array form and their twins, which see one state at a time, come to the same verdict."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hkv.contract.invariant import Invariant
from hkv.dialects.vllm.explorer import Space
from hkv.dialects.vllm.explorer.judges import JUDGES
from hkv.dialects.vllm.explorer.moves import LOOKED_UP, Fact, all_moves, to_log
from hkv.dialects.vllm.explorer.transition import Program, start
from hkv.dialects.vllm.invariants import INVARIANTS, KeyBook, Moment, Snapshot
from hkv.dialects.vllm.invariants.moment import Ledger, RequestRecord
from hkv.dialects.vllm.invariants.rows import HitAdmission
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Answer, CacheState, Operation
from hkv.dialects.vllm.rules.operations import Code
from hkv.spec import FullAttention, Mamba
from hkv.state.state import GROUP_WORDS, REQUEST_WORDS, Request, Row, State
from hkv.state.status import Status
from tests.testing.plain_explorer import CHUNK, cache_state, space, unpack_many

JUDGED = 192
"""Of so many moments the twins are asked in one example; they take most of the time."""

TWINS = tuple(name for name in JUDGES if name in INVARIANTS)


def test_every_judge_has_a_twin() -> None:
    """But for two: that legal operations are performed, and that the compiled key table, of which logs know nothing,
    agrees with the keys."""
    assert set(JUDGES) - set(TWINS) == {"totality", "key table"}


class Twins:
    """The invariants of `hkv.testing`, asked about one moment of an exploration."""

    def __init__(self, small: Space) -> None:
        self._space, self._ledger, self._book = small, Ledger(small.config), KeyBook()
        unit, longest = small.config.hash_block_size, small.config.max_model_len
        for tokens in itertools.product((0, 1), repeat=longest):
            self._ledger.requests["any"] = RequestRecord("any", list(tokens), oplog.ExtraKeys(), longest)
            for end in range(unit, longest + 1, unit):
                name = self._ledger.prefix("any", end)
                assert name is not None
                code = int("1" + "".join(map(str, tokens[:end])), 2)
                self._book.learn(code.to_bytes(8, "big").hex(), name)
        del self._ledger.requests["any"]

    def broken(self, move: np.ndarray, ledger: np.ndarray, moment: _Given) -> set[str]:
        """Names of the invariants that break."""
        self._ledger.requests = {
            str(slot): self._record(str(slot), row) for slot, row in enumerate(ledger.tolist()) if row[Fact.STRING]
        }
        names = [str(slot) for slot in range(len(ledger))]
        hit = moment.adopted if ledger[move[1], Fact.FOCUS] == LOOKED_UP else 0
        operation = to_log(move, ledger, hit, names)
        answer = self._answer(move, moment)
        self._ledger.before(operation)
        self._ledger.after(operation, answer)
        asked = Moment(
            config=self._space.config,
            ledger=self._ledger,
            book=self._book,
            operation=operation,
            answer=answer,
            before=Snapshot(moment.before),
            after=Snapshot(moment.after),
            again=answer if isinstance(answer, oplog.Hit) else None,
            hits={},
        )
        invariants = self._invariants(operation, moment)
        return {name for name, invariant in invariants.items() if _breaks(invariant, asked)}

    def requests(self) -> dict[str, RequestRecord]:
        """Requests as the plain ledger has them after the operation."""
        return self._ledger.requests

    def _invariants(self, operation: Operation, moment: _Given) -> dict[str, Invariant]:
        admission = HitAdmission(self._space.config)
        if isinstance(operation, oplog.AllocateOp) and operation.hit:
            admission._found = oplog.Hit(moment.adopted, moment.adopted_blocks, 0)
            # One moment does not say which states are of this step; the judge excuses every hit beside states.
            admission._young = set(Snapshot(moment.before).entries)
        checks = {name: INVARIANTS[name] for name in TWINS}
        return {**checks, "hit admission": dataclasses.replace(INVARIANTS["hit admission"], check=admission.check)}

    @staticmethod
    def _record(id: str, row: list[int]) -> RequestRecord:
        tokens = [int(bit) for bit in f"{row[Fact.STRING]:b}"[1:]]
        return RequestRecord(
            id,
            tokens,
            oplog.ExtraKeys(),
            len(tokens),
            computed=row[Fact.COMPUTED],
            running=bool(row[Fact.RUNNING]),
            processed=row[Fact.PROCESSED],
            main=row[Fact.MAIN],
            slots=row[Fact.MAIN],
        )

    def _answer(self, move: np.ndarray, moment: _Given) -> Answer:
        if move[0] == Code.LOOKUP:
            return oplog.Hit(moment.found, moment.found_blocks, moment.shared_prefix)
        if move[0] == Code.ALLOCATE:
            return oplog.Allocation([[]] if moment.status == Status.OK else None)
        return oplog.Reset(moment.status == Status.OK) if move[0] == Code.RESET else None


class _Given:
    """A moment as the explorer has it, read for the twins."""

    def __init__(self, small: Space, move: np.ndarray, before: State, after: State, answers: np.ndarray) -> None:
        slot = int(move[1])
        self.before: CacheState = cache_state(small, before)
        self.after: CacheState = cache_state(small, after)
        self.status, self.shared_prefix = map(int, answers)
        self.found, self.found_blocks = _lookup(small, after, slot)
        self.adopted, self.adopted_blocks = _lookup(small, before, slot)


def _lookup(small: Space, state: Any, slot: int) -> tuple[int, list[list[int]]]:
    hit = max(0, int(state.requests[slot, Request.HIT]))
    rows = []
    for group, size in enumerate(small.config.block_sizes):
        end = -(-hit // size) if small.config.topology.specs[group].prefix_cacheable else 0
        start = min(int(state.requests[slot, REQUEST_WORDS + GROUP_WORDS * group + Row.HIT_FIRST]), end)
        blocks = state.rows[slot, group, start:end].tolist()
        rows.append([0] * start + blocks + [0] * (end - start - len(blocks)))
    return hit, rows


def _breaks(invariant: Invariant, moment: Moment) -> bool:
    if invariant.after and not isinstance(moment.operation, invariant.after):
        return False
    return any(True for _ in invariant.check(moment))


def corrupt(random: np.random.Generator, small: Space, state: Any, answers: np.ndarray) -> tuple[Any, np.ndarray]:
    """A state with something changed, or an answer."""
    changed = {name: np.array(getattr(state, name)) for name in State.__dataclass_fields__}
    answers, blocks = answers.copy(), small.config.num_blocks
    live = np.flatnonzero(changed["requests"][:-1, Request.LIVE])
    block, slot = int(random.integers(1, blocks)), int(random.choice(live)) if len(live) else 0
    group = int(random.integers(len(small.config.topology.specs)))
    column, entry = int(random.integers(small.buckets.row)), REQUEST_WORDS + GROUP_WORDS * group
    keys = changed["keys"]
    match int(random.integers(12 if len(live) else 6)):
        case 0:
            changed["blocks"][block] = -int(random.integers(0, 3))
        case 1:
            queue = changed["queue"]
            one, two = random.choice(np.flatnonzero(queue[:-1]), 2)
            queue[one], queue[two] = queue[two], queue[one]
        case 2:
            changed["queue"][random.choice(np.flatnonzero(changed["queue"][:-1]))] = int(random.integers(blocks))
        case 3:
            keys[block] = keys[int(random.integers(1, blocks))]
        case 4:
            part, number = int(random.integers(1 + small.buckets.parts)), int(random.integers(2, small.buckets.keys))
            keys[block, part] = (number * small.buckets.groups + group + 1) * (1 if part else 4)
            keys[block, 0] |= 2 * np.any(keys[block, 1 : 1 + small.buckets.parts])
        case 5:
            keys[block] = 0
        case 6:
            changed["rows"][slot, group, column] = int(random.integers(blocks))
        case 7:
            changed["requests"][slot, entry + Row.LENGTH] = int(random.integers(small.buckets.row + 1))
        case 8:
            changed["requests"][slot, entry + Row.FIRST] = int(random.integers(2))
        case 9:
            changed["requests"][slot, Request.HIT] = int(random.integers(small.config.max_model_len))
        case 10:
            changed["requests"][slot, entry + Row.HIT_FIRST] = int(random.integers(2))
        case _:
            answers[0] = Status.NO_ROOM if answers[0] == Status.OK else Status.OK
    words: dict[str, Any] = changed
    return State(**words), answers


def listed(state: Any) -> bool:
    """True if walking the key table finds each block under each of its keys, and nothing else."""
    parts = state.buckets.parts
    # Which of its keys a block has under an entry, counted from 1: 0 for the key of the whole block.
    held: dict[tuple[int, int], int] = {}
    for block, words in enumerate(state.keys[:-1, : 1 + parts].tolist()):
        if bool(words[0] & 2) != any(words[1:]):
            return False
        for part, word in enumerate([words[0] >> 2, *words[1:]]):
            if (word, block) in held:
                return False
            if word:
                held[word, block] = part
    found: set[tuple[int, int]] = set()
    for entry, value in enumerate(state.table[:-1].ravel().tolist(), 1):
        if value <= 0 or entry % state.table.shape[1] == 0:
            continue
        block = value >> 3
        chain = [block]
        while value & 1 and len(chain) <= len(state.keys):
            if (entry, block) not in held:
                return False
            part = held[entry, block]
            after = int(state.links[block, 2 * part])
            if (entry, after) not in held or int(state.links[after, 2 * held[entry, after] + 1]) != block:
                return False
            block = after
            if block == chain[0]:
                break
            chain.append(block)
        if bool(value & 1) != (len(chain) > 1):
            return False
        found |= {(entry, block) for block in chain}
    return found == set(held)


RECURRENT = (FullAttention(block_size=1), Mamba(block_size=1))
"""Attention and states; explored with the drop of a draft."""

MIXED = (FullAttention(block_size=2), Mamba(block_size=1))
"""Blocks of two sizes; the longer ones have keys that end inside."""


@pytest.fixture(scope="module", params=["tokens", "states", "mixed"])
def reached(request: pytest.FixtureRequest) -> tuple[Space, Program, np.ndarray, np.ndarray]:
    """A space, its program, and some of its worlds with the operations that may follow."""
    small = {
        "tokens": lambda: space(),
        "states": lambda: space(*RECURRENT, num_blocks=6, length=3, prompt=2, eagle=True),
        "mixed": lambda: space(*MIXED, num_blocks=7, length=4, prompt=3),
    }[request.param]()
    program, random = Program(small), np.random.default_rng(1)
    worlds, enabled = start(small)[None], None
    moves = all_moves(small)
    step = np.array([Code.STEP, 0, 0, 0], np.int32)
    enabled = np.asarray(program(np.broadcast_to(worlds, (CHUNK, worlds.shape[1])), _filled(step)).enabled)[:1]
    for _ in range(12):
        chosen = random.integers(len(worlds), size=CHUNK)
        picked = np.array([random.choice(np.flatnonzero(enabled[world])) for world in chosen])
        outcome = jax.device_get(program(worlds[chosen], moves[picked]))
        assert not outcome.broken.any()
        worlds = np.concatenate([worlds, outcome.world])[-4 * CHUNK :]
        enabled = np.concatenate([enabled, outcome.enabled])[-4 * CHUNK :]
    return small, program, worlds, enabled


def _filled(row: np.ndarray) -> np.ndarray:
    return np.broadcast_to(row, (CHUNK, *row.shape))


@given(seed=st.integers(0, 1 << 32), damaged=st.booleans())
@settings(max_examples=6)
def test_verdicts_are_those_of_the_twins(
    reached: tuple[Space, Program, np.ndarray, np.ndarray], seed: int, damaged: bool
) -> None:
    """Operations on states that were reached, with the state after them damaged or not: invariant by invariant."""
    small, program, worlds, enabled = reached
    random, moves, twins = np.random.default_rng(seed), all_moves(small), Twins(small)
    chosen = random.integers(len(worlds), size=CHUNK)
    rows = moves[[random.choice(np.flatnonzero(enabled[world])) for world in chosen]]
    states, answers = jax.device_get(program.perform(program.parameters, worlds[chosen], rows))
    after = [jax.tree.map(lambda leaf, i=i: leaf[i], states) for i in range(CHUNK)]
    answers = np.array(answers)
    if damaged:
        for i in range(JUDGED):
            after[i], answers[i] = corrupt(random, small, after[i], answers[i])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *after)
    broken = np.asarray(program.assess(worlds[chosen], rows, stacked, answers).broken)
    unpacked = jax.device_get(unpack_many(small)(worlds[chosen]))
    counted = 0
    for i in range(JUDGED):
        before = jax.tree.map(lambda leaf, i=i: leaf[i], unpacked)
        given = _Given(small, rows[i], before.state, after[i], answers[i])
        wanted = twins.broken(rows[i], before.ledger, given) & set(TWINS)
        found = {name for bit, name in enumerate(JUDGES) if broken[i] >> bit & 1} & set(TWINS)
        assert found == wanted, (found ^ wanted, rows[i].tolist(), given.before, given.after, given.status)
        assert bool(broken[i] >> list(JUDGES).index("key table") & 1) != listed(after[i])
        counted += bool(wanted)
    assert (counted > JUDGED // 4) == damaged


def test_the_ledger_is_the_plain_one(reached: tuple[Space, Program, np.ndarray, np.ndarray]) -> None:
    small, program, worlds, enabled = reached
    random, moves, twins = np.random.default_rng(5), all_moves(small), Twins(small)
    chosen = random.integers(len(worlds), size=CHUNK)
    rows = moves[[random.choice(np.flatnonzero(enabled[world])) for world in chosen]]
    states, answers = jax.device_get(program.perform(program.parameters, worlds[chosen], rows))
    outcome = jax.device_get(program.assess(worlds[chosen], rows, states, answers))
    unpacked, after = (jax.device_get(unpack_many(small)(packed)) for packed in (worlds[chosen], outcome.world))
    for i in range(CHUNK):
        before = jax.tree.map(lambda leaf, i=i: leaf[i], unpacked)
        given = _Given(small, rows[i], before.state, jax.tree.map(lambda leaf, i=i: leaf[i], states), answers[i])
        twins.broken(rows[i], before.ledger, given)
        wanted = {id: (r.tokens, r.computed, r.running, r.processed, r.main) for id, r in twins.requests().items()}
        found = {
            str(slot): (
                [int(bit) for bit in f"{row[Fact.STRING]:b}"[1:]],
                *(int(row[Fact.COMPUTED]), bool(row[Fact.RUNNING]), int(row[Fact.PROCESSED]), int(row[Fact.MAIN])),
            )
            for slot, row in enumerate(after.ledger[i])
            if row[Fact.STRING]
        }
        assert found == wanted, rows[i].tolist()
