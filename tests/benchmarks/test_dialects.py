"""`benchmarks/dialects.py`: what it writes down of a replay is what was asked, in slots that are used again."""

import random

from benchmarks.dialects import Listening, Sides
from hkv.dialects.rtp_llm.config import HYBRID
from hkv.dialects.rtp_llm.operations import RtpArgument, RtpCode
from hkv.oracle.replay.schedule import Arrival, Schedule
from hkv.spec import spec_from_text


def made() -> list[Arrival]:
    """Requests over three prefixes; two of them fit at once."""
    rng, arrivals = random.Random(1), []
    for index in range(12):
        keys = [*range(100 * (index % 3), 100 * (index % 3) + 4), *range(1000 + 50 * index, 1050 + 50 * index)]
        arrivals.append(Arrival(index, index, rng.randint(16, 28), rng.randint(1, 9), lambda keys=keys: keys))
    return arrivals


def test_the_operations_of_a_replay_are_written_down() -> None:
    specs = [spec_from_text("full:4"), spec_from_text("mamba:4")]
    sides = Sides(specs, 30, HYBRID, Schedule(max_model_len=64), made())
    listened: Listening = sides.listened
    table = sides._batch.table[: sides.operations]
    counts = [int((table[:, RtpArgument.CODE] == code).sum()) for code in RtpCode]
    assert counts[RtpCode.REQUEST] == counts[RtpCode.INSERT] == counts[RtpCode.DROP] == 12
    assert counts[RtpCode.MALLOC] == len(listened.verdicts) >= 12
    assert counts[RtpCode.FREE] >= 12
    assert 2 <= listened.slots < 12, "slots are used again"
    assert sum(reused for _, reused in listened.verdicts) > 0
    assert sides.rtp_numpy()[1] > 0
    assert sides.vllm_numpy()[1] > 0
