"""Logs recorded from RTP-LLM's own C++ (main, 20 August 2026): the reference answers each operation as it did."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter

import msgspec
import pytest

from hkv.contract import registry
from hkv.contract.log import Log
from hkv.dialects.rtp_llm.bugs import BUGS
from hkv.dialects.rtp_llm.engines.numpy import RtpNumpyEngine
from hkv.dialects.rtp_llm.invariants import RtpWatch
from hkv.oracle.check import Difference, check_log, known_defects
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import read_log

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "data" / "rtp_llm"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
NUMPY = engine_factory("numpy")
DIALECT = registry.dialect_of("rtp-llm/single")

DEFECTS = {
    "case-fork-forgets-alignment-hybrid": "fork-forgets-alignment",
    "case-fork-forgets-alignment-single": "fork-forgets-alignment",
    "case-leak-of-backfilled-states": "leak-of-backfilled-states",
    "case-refused-fork-keeps-freed-lists": "refused-fork-keeps-freed-lists",
    "hybrid-fork-1022": "fork-forgets-alignment",
    "hybrid-pool-fork-1028": "fork-forgets-alignment",
    "single-fork-1002": "fork-forgets-alignment",
}
"""Logs in which a defect shows."""


def recorded(name: str, **changes: object) -> Log:
    log = read_log(FOLDER / f"{name}.jsonl")
    return dataclasses.replace(log, header=msgspec.structs.replace(log.header, **changes))


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_answers_as_the_engine_did(name: str) -> None:
    log = recorded(name)
    assert set(log.header.bugs) == set(BUGS)
    difference = check_log(log, NUMPY)
    assert difference is None, difference.describe()


def test_the_logs_are_of_every_kind() -> None:
    assert len(NAMES) == 105
    shown: Counter[str] = Counter()
    for name in NAMES:
        shown.update(DIALECT.exercised(recorded(name)).keys())
    # RTP-LLM throws where a window's last blocks would be missing, and a thrown error ends its recorder.
    assert set(DIALECT.coverage) - set(shown) == {"tail-missing"}


@pytest.mark.parametrize("name", NAMES)
def test_the_contract_differs_where_a_defect_shows_and_nowhere_else(name: str) -> None:
    log = recorded(name, bugs=[])
    difference = check_log(log, NUMPY)
    if name not in DEFECTS:
        assert difference is None, difference.describe()
        return
    assert isinstance(difference, Difference)
    assert known_defects(log, NUMPY, difference, ()) == (DEFECTS[name],)


@pytest.mark.parametrize("name", NAMES)
def test_invariants_hold_of_the_engines_traffic(name: str) -> None:
    log = recorded(name, bugs=[])
    watch = RtpWatch(RtpNumpyEngine(log.header), log.header)
    for operation in log.operations:
        watch.perform(operation)
