"""The reference manager under random traffic: every invariant of the log, and nothing that fails."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hkv.contract.traffic import RandomChoices
from hkv.dialects.vllm.log.structs import Answer, Header, Operation
from hkv.dialects.vllm.traffic.headers import FEATURES, draw_header
from hkv.dialects.vllm.traffic.live import drive
from tests.suites.history import HistorySuite
from tests.suites.watched import WATCHED

STEPS = 10
"""Scheduling steps of one example."""


def begin(choices: RandomChoices, topic: str) -> tuple[Header, Callable[[Callable[[Operation], Answer]], None]]:
    """Random lock-step traffic over a small pool, prefixes that come back, lengths around every modulus."""
    header = draw_header(choices, topic, version=2)
    if choices.chance(50):
        # Whoever names no defect is held to the contract, also where vLLM 0.33 fails.
        header = msgspec.structs.replace(header, bugs=[])

    def play(perform: Callable[[Operation], Answer]) -> None:
        drive(header, choices, perform, STEPS, careful=bool(header.bugs))

    return header, play


SUITE = HistorySuite(
    "traffic",
    "the reference manager under random traffic, A then B then A again, over tiny pools",
    FEATURES,
    WATCHED,
    begin,
)
