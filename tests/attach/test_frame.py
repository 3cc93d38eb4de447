"""The frame of observation, without an engine to observe: settings, files, the engine beside it."""

from __future__ import annotations

import gzip
import json
import pathlib
import random
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from hkv.contract import registry
from hkv.dialects.vllm.log import structs as oplog
from hkv.errors import ConfigError, HKVError
from hkv.oracle.attach.attach import VARIABLE, AttachSettings, Session, attach_all, settings_from, settings_of
from hkv.oracle.attach.sink import ShadowError, ShadowSink
from hkv.oracle.check import check_log
from hkv.oracle.engines import engine_factory
from hkv.oracle.log_file import read_log
from hkv.oracle.record import Recording, record

VLLM = registry.dialect_of("vllm-0.33")


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(engine_factory("numpy"), "core", 3, 3, 12)


def say(sink: Any, recording: Recording) -> None:
    note = sink.calls_to(lambda call: call[0](*call[1:]))
    note((sink.begin, recording.header))
    for operation, answer in zip(recording.operations, recording.answers, strict=True):
        note((sink.operation, operation, answer))
        sink.step_ends()
    sink.close()


@pytest.mark.parametrize("compression", ["", "gz", "zst"])
@pytest.mark.parametrize("part_bytes", [None, 3000])
def test_what_is_said_is_read_again(
    tmp_path: pathlib.Path, recording: Recording, compression: str, part_bytes: int | None
) -> None:
    if compression == "zst":
        pytest.importorskip("zstandard")
    session = Session(AttachSettings(folder=str(tmp_path), compression=compression, part_bytes=part_bytes))
    session.label = "a-test"
    say(session.sink(VLLM), recording)
    session.close()
    suffix = f".{compression}" if compression else ""
    assert (len(list(tmp_path.iterdir())) > 1) == (part_bytes is not None)
    if compression == "gz" and part_bytes is not None:  # a part is compressed by itself
        assert gzip.decompress((tmp_path / "a-test-1.part1.jsonl.gz").read_bytes())
    log = read_log(tmp_path / f"a-test-1.jsonl{suffix}")
    assert list(log.operations) != []
    assert len(log.operations) == len(recording.operations)
    assert check_log(log, engine_factory("numpy")) is None


def test_a_cache_that_is_left_out_stands_in_a_table(tmp_path: pathlib.Path) -> None:
    session = Session(AttachSettings(folder=str(tmp_path)))
    session.label = "t"
    session.refuse("HiSparseHotSpec", "a role\nthat is not told")
    session.close()
    assert (tmp_path / "refused.txt").read_text() == "t\tHiSparseHotSpec\ta role that is not told\n"


def test_a_share_of_caches_is_observed(tmp_path: pathlib.Path) -> None:
    before = random.getstate()
    for share, least, most in ((1, 2000, 2000), (0.25, 350, 650)):  # eight standard deviations either way
        session = Session(AttachSettings(folder=str(tmp_path), share=share))
        assert least <= sum(session.draws() for _ in range(2000)) <= most
        session.close()
    assert random.getstate() == before  # the observed engine's own


@pytest.mark.parametrize("share", ["0", "-0.5", "1.5", "true", '"half"', "null"])
def test_a_share_is_a_probability(share: str) -> None:
    with pytest.raises(ConfigError, match=r"share = .*: expected a probability above 0, 1 at most"):
        settings_of(f'{{"folder": "logs", "share": {share}}}')


FORKS = """
import multiprocessing, os, sys
from hkv.oracle.attach.attach import AttachSettings, Session

session = Session(AttachSettings(folder=sys.argv[1], share=float(sys.argv[2])))
session.say("toy caches")
child = multiprocessing.get_context("fork").Process(target=session.flush)
child.start()
child.join()
session.close()
print(os.getpid(), child.pid)
"""
"""A process in which no backend of JAX stands: those do not outlive a fork, and warn of it."""


@pytest.mark.parametrize(("share", "said"), [(1, ""), (0.25, ", each with probability 0.25")])
def test_a_forked_process_says_its_own_line(tmp_path: pathlib.Path, share: float, said: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path), str(share)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = [f"hkv: toy caches are recorded to {tmp_path}{said} (process {id})" for id in ran.stdout.split()]
    assert len(lines) == 2
    assert ran.stderr.splitlines() == lines


def test_the_engine_beside_it_agrees(tmp_path: pathlib.Path, recording: Recording) -> None:
    sink = ShadowSink(tmp_path / "a.jsonl")
    sink.begin(recording.header)
    for operation, answer in zip(recording.operations, recording.answers, strict=True):
        sink.operation(operation, answer)
    assert (sink.difference, sink.operations) == (None, len(recording.operations))
    assert not list(tmp_path.iterdir())


def test_events_whose_keys_are_not_told_agree(tmp_path: pathlib.Path, recording: Recording) -> None:
    """VLLM publishes integers of 64 bits by default, of which a live cache tells none."""
    untold = ("keys", "parent", "medium")
    sink = ShadowSink(tmp_path / "a.jsonl")
    sink.begin(recording.header)
    stored = 0
    for operation, answer in zip(recording.operations, recording.answers, strict=True):
        if isinstance(operation, oplog.EventsOp):
            stored += sum(event.type == "stored" for event in answer)
            answer = [msgspec.structs.replace(event, **dict.fromkeys(untold)) for event in answer]
        sink.operation(operation, answer)
    assert stored
    assert sink.difference is None


@pytest.mark.parametrize("reaction", ["report", "raise"])
def test_the_first_difference_is_reported_with_its_case(
    tmp_path: pathlib.Path, recording: Recording, reaction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = next(
        index
        for index, answer in enumerate(recording.answers)
        if isinstance(answer, oplog.Allocation) and answer.blocks and answer.blocks[0]
    )
    wrong = oplog.Allocation([[99], *recording.answers[place].blocks[1:]])
    sink = ShadowSink(tmp_path / "a.jsonl", raises=reaction == "raise")
    sink.begin(recording.header)
    for operation, answer in zip(recording.operations[:place], recording.answers[:place], strict=True):
        sink.operation(operation, answer)
    if reaction == "raise":
        with pytest.raises(ShadowError, match="allocate"):
            sink.operation(recording.operations[place], wrong)
    else:
        sink.operation(recording.operations[place], wrong)
        assert "the live cache differs" in capsys.readouterr().err
    assert sink.difference is not None
    assert (sink.difference.line, sink.difference.operation) == (place + 2, "allocate")
    assert len(read_log(tmp_path / "a.jsonl").operations) == place + 1
    sink.operation(recording.operations[place], recording.answers[place])
    assert sink.operations == place + 1


def test_settings_and_their_text(tmp_path: pathlib.Path) -> None:
    settings = AttachSettings(folder=str(tmp_path), mode="shadow", states="step", compression="gz", part_bytes=9)
    assert settings_of(settings.variable()) == settings
    assert settings_from({VARIABLE: "logs"}) == AttachSettings(folder="logs")
    assert settings_from({}) is None


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"folder": ""}, "folder"),
        ({"folder": "a", "mode": "watch"}, "mode"),
        ({"folder": "a", "states": "some"}, "states"),
        ({"folder": "a", "compression": "xz"}, "compression"),
        ({"folder": "a", "part_bytes": 0}, "part_bytes"),
        ({"folder": "a", "nonsense": 0}, VARIABLE),
        ({}, VARIABLE),
    ],
)
def test_bad_settings(fields: dict[str, Any], argument: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(json.dumps(fields))
    assert caught.value.argument == argument


def test_no_engine_to_observe(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HKVError, match="none of vllm, sglang, lmcache is installed"):
        attach_all(str(tmp_path))


def test_a_dialect_without_live_caches_says_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(HKVError, match="live caches"):
        registry.dialect_of("rtp-llm/single").attach(object(), Session(AttachSettings(folder=str(tmp_path))))
