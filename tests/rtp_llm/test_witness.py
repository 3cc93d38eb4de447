"""RTP-LLM's text beside its witness, objects that were written before it: answers and state after every operation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from hkv.contract.answer import Failure
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.engines.engine import attempt_rtp
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import OPERATIONS, to_rtp_header
from hkv.errors import OperationError
from tests.rtp_llm.traffic import draw_config, draw_operation
from tests.rtp_llm.witness.engine import WitnessEngine


def assert_alike(text: RtpNumpyEngine, witness: WitnessEngine, place: Any) -> None:
    assert text.state() == witness.state(), place
    for name in ("evictions", "duplicates"):
        assert getattr(text, name) == getattr(witness, name), (place, name)
    assert text.num_available() == witness.num_available(), place
    assert text.num_cached() == witness.num_cached(), place


def test_text_and_witness_agree_on_random_operations() -> None:
    counts: Counter[type[structs.RtpOp]] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        header = to_rtp_header(draw_config(rng, roomy=seed % 5 == 4), "random")
        witness, text = WitnessEngine(header), RtpNumpyEngine(header)
        for number in range(100):
            operation = draw_operation(rng, number, text)
            want, got = attempt_rtp(witness, operation), attempt_rtp(text, operation)
            place = (seed, number, operation)
            assert isinstance(want, Failure) == isinstance(got, Failure), (place, want, got)
            assert isinstance(want, Failure) or got == want, (place, want, got)
            assert_alike(text, witness, place)
            counts[type(operation)] += not isinstance(want, Failure)
    assert counts.keys() == set(OPERATIONS) - {structs.StateOp}
    assert min(counts.values()) > 10, counts


KEYS = 12
"""So few that they repeat, within requests and among them, and may build on each other in a circle."""


def test_text_and_witness_agree_on_requests_with_keys() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        config = draw_config(rng)
        header = to_rtp_header(config, "random")
        witness, text = WitnessEngine(header), RtpNumpyEngine(header)
        for number in range(100):
            call = draw_keyed(rng, number, text, config.block_size)
            answers = []
            for engine in (witness, text):
                try:
                    answers.append(call(engine))
                except OperationError:
                    answers.append("refused")
            assert answers[0] == answers[1], (seed, number)
            assert_alike(text, witness, (seed, number))
            for key in range(KEYS):
                fates = [engine.absence(0, key) for engine in (witness, text)]
                assert fates[0] == fates[1], (seed, number, key)
                seen[fates[0]] += 1
        seen["evictions"] += text.evictions
        seen["duplicates"] += text.duplicates
    assert len(seen) == 7, seen
    assert min(seen.values()) > 50, seen


def draw_keyed(rng: random.Random, number: int, engine: RtpNumpyEngine, size: int) -> Callable[[Any], Any]:
    """A call of an engine: a request with keys, or one that is grown, cached, freed or dropped."""
    id = rng.choice(sorted(engine.requests)) if engine.requests else ""
    if len(engine.requests) < 3 or rng.random() < 0.1:
        length, reserve = rng.randint(1, 9 * size), rng.choice([0, 0, 2])
        start, step = rng.randrange(KEYS), rng.choice([1, 1, 1, 5])
        keys = [(start + step * n) % KEYS for n in range(40)]
        return lambda engine: engine.request_keyed(f"r{number}", length, keys, reserve)
    if rng.random() < 0.2:
        more = rng.randint(1, 2 * size)
        return lambda engine: engine.extend(id, more)
    malloc, insert, free = structs.MallocOp(id=id), structs.InsertOp(id=id), structs.FreeOp(id=id)
    drop = structs.DropOp(id=id)
    operation = rng.choice([malloc, malloc, insert, free, drop] if engine.rows(id)[0][0] else [malloc, malloc, drop])
    return lambda engine: engine.perform(operation)
