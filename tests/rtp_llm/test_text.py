"""RTP-LLM's rules as a text, beside the objects of its reference: answers and state after every operation."""

from __future__ import annotations

import random
from collections import Counter

from hkv.contract.answer import Failure
from hkv.dialects.rtp_llm.engines.engine import attempt_rtp
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.log import OPERATIONS, RtpOp, StateOp, to_rtp_header
from tests.rtp_llm.text import RtpTextEngine
from tests.rtp_llm.traffic import draw_config, draw_operation


def test_text_and_objects_agree_on_random_operations() -> None:
    counts: Counter[type[RtpOp]] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        header = to_rtp_header(draw_config(rng, roomy=seed % 5 == 4), "random")
        objects, text = RtpNumpyEngine(header), RtpTextEngine(header)
        for number in range(100):
            operation = draw_operation(rng, number, objects)
            want, got = attempt_rtp(objects, operation), attempt_rtp(text, operation)
            place = (seed, number, operation)
            assert isinstance(want, Failure) == isinstance(got, Failure), (place, want, got)
            assert isinstance(want, Failure) or got == want, (place, want, got)
            assert text.state() == objects.state(), place
            for name in ("evictions", "duplicates"):
                assert getattr(text, name) == getattr(objects, name), (place, name)
            assert text.num_available() == objects.num_available(), place
            assert text.num_cached() == objects.num_cached(), place
            counts[type(operation)] += not isinstance(want, Failure)
    assert counts.keys() == set(OPERATIONS) - {StateOp}
    assert min(counts.values()) > 10, counts
