"""VLLM's text, run plainly, against the reference of classes: answers and whole states after every operation."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from hkv.contract.bugs import check_bugs
from hkv.dialects.vllm.bugs import BUGS
from hkv.dialects.vllm.config import NAME
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.engines.plain import PlainEngine
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.traffic.headers import MANAGER_BUGS
from hkv.errors import OperationError
from hkv.oracle.record import Only, draw
from reference.dialects.vllm.fork import fork
from tests.vllm_text.both import DIALECT, held_together, seen

FEATURES = DIALECT.features(NAME)


@pytest.mark.parametrize("version", DIALECT.versions)
@pytest.mark.parametrize("feature", FEATURES)
def test_all_traffic_is_answered_alike(feature: str, version: int) -> None:
    for seed in (version, 5 + version):
        held_together(feature, seed, version, 12)


OWN = {"chunk_pair", "sink_window"}
"""Kinds that are drawn only where they are asked for."""


@pytest.mark.parametrize("kind", sorted(DIALECT.kinds))
def test_every_kind_is_managed_alike(kind: str) -> None:
    kinds = frozenset({kind, "full_attention", "mamba"} if kind in OWN else {kind, "full_attention"})
    version = 3
    for seed in range(2):
        held_together("external", seed, version, 12, only=Only(kinds))
        if kind != "cross_attention":
            held_together("retention", seed, version, 12, only=Only(kinds))


@pytest.mark.parametrize("feature", ["partial", "speculative_state", "external", "sharing"])
def test_defects_are_reproduced_alike(feature: str) -> None:
    every = set(MANAGER_BUGS)
    check_bugs(frozenset(every), BUGS)
    for seed in range(4):
        held_together(
            feature, seed, 4, 12, bugs=sorted(every if seed % 2 else random.Random(seed).sample(sorted(every), 6))
        )


@pytest.mark.parametrize(
    ("feature", "version", "seed"),
    [("lookahead_hash", 4, 4), ("external", 4, 16), ("partial", 3, 4), ("sharing", 4, 13)],
)
def test_a_defect_that_fails_does_so_in_both(feature: str, version: int, seed: int) -> None:
    assert held_together(feature, seed, version, 12, bugs=MANAGER_BUGS)[1]


# What no log asks for: requests of which only keys are known, why they miss, forks.


class Both:
    """Two engines that are asked the same."""

    def __init__(self, header: oplog.Header) -> None:
        self.right, self.tested = NumpyEngine(header), PlainEngine(header)

    def __getattr__(self, name: str) -> Any:
        def perform(*arguments: Any) -> Any:
            answers = []
            for engine in (self.right, self.tested):
                try:
                    answers.append(getattr(engine, name)(*arguments))
                except OperationError as error:
                    answers.append((error.argument, error.expected))
            assert answers[0] == answers[1], (name, arguments)
            states = [(engine.state(), seen(engine)) for engine in (self.right, self.tested)]
            assert states[0] == states[1], (name, arguments)
            return answers[0]

        return perform

    def fork(self, parent: str, child: str) -> Any:
        try:
            want: Any = fork(self.right.manager, parent, child)
        except OperationError as error:
            with pytest.raises(OperationError, match=error.argument):
                self.tested.fork(parent, child)
            return None
        assert self.tested.fork(parent, child) == want
        assert self.tested.state() == self.right.state()
        return want


@pytest.mark.parametrize("feature", ["core", "eagle", "partial", "speculative_state", "retention", "external"])
def test_keys_misses_and_forks_are_alike(feature: str) -> None:
    for seed in range(6):
        header, _ = draw(feature, seed, 3)
        play(Both(header), header, random.Random(seed))


def play(both: Both, header: oplog.Header, chance: random.Random) -> None:
    """Keyed requests of few prompts come, grow, fork, are preempted and end."""
    hash, longest = header.hash_block_size, min(header.max_model_len, 100)
    names, held = itertools.count(), dict[str, SimpleNamespace]()
    # Prompts that have their first 40 tokens in common, or none.
    chains = [
        [at if n < 2 and at < 40 // hash else 1000 * n + at for at in range(longest // hash + 1)] for n in (0, 1, 2)
    ]
    for _ in range(120):
        running = [id for id, each in held.items() if each.running]
        waiting = [id for id in held if id not in running]
        match chance.choice(("new", "grow", "grow", "admit", "admit", "fork", "free", "end", "step", "miss", "copies")):
            case "new":
                length, chain = chance.randint(1, longest // 2), chance.choice(chains)
                both.request_keyed(id := f"r{next(names)}", length, chain)
                held[id] = SimpleNamespace(running=False, tokens=length, computed=0, chain=chain)
            case "admit" if waiting:
                each = held[id := chance.choice(waiting)]
                found = both.lookup(id)
                new = each.tokens - found.hit
                given = oplog.AllocateOp(
                    id=id, new=new, hit=found.hit, lookahead=chance.choice((0, 3)), external=0, delay=False,
                    must_fit=chance.random() < 0.5, reserved=0, in_flight=0,
                )  # fmt: skip
                if both.allocate(given).blocks is not None:
                    each.running, each.computed = True, each.tokens
                    both.advance(id, each.tokens)
            case "grow" if running:
                each, more = held[id := chance.choice(running)], chance.randint(1, 7)
                if each.tokens + more <= longest:
                    both.extend(id, more)
                    each.tokens += more
                    given = oplog.AllocateOp(
                        id=id, new=each.tokens - each.computed, hit=0, lookahead=0, external=0, delay=True,
                        must_fit=False, reserved=0, in_flight=0,
                    )  # fmt: skip
                    if both.allocate(given).blocks is not None:
                        both.advance(id, each.tokens - each.computed)
                        each.computed = each.tokens
                        both.commit(id, each.computed)
            case "fork" if held:
                id, child = chance.choice(list(held)), f"r{next(names)}"
                if both.fork(id, child) is not None:
                    held[child] = SimpleNamespace(**vars(held[id]))
            case "free" if running:
                each = held[id := chance.choice(running)]
                both.free(id)
                each.running, each.computed = False, 0
            case "end" if held:
                each = held[id := chance.choice(list(held))]
                if each.running:
                    both.free(id)
                both.drop(id)
                del held[id]
            case "step":
                both.step()
            case "copies":
                both.copies()
            case "miss":
                for chain, group in itertools.product(chains, range(len(header.groups))):
                    for key in chain[:30]:
                        both.absence(group, key)
                        both.eviction(group, key)
