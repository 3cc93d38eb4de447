"""The live page beside an observed cache: it shows what the engine is in, and costs nothing while nobody looks."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

from hkv.contract import registry
from hkv.errors import ConfigError
from hkv.oracle.attach import shown
from hkv.oracle.attach.attach import AttachSettings, Session, settings_of
from hkv.oracle.attach.sink import ShadowSink
from hkv.oracle.engines import engine_factory
from hkv.oracle.record import Recording, record
from hkv.oracle.side import FREE
from hkv.page import packed
from tests.page.reading import cells_of, data_in
from tests.page.test_page import expected

VLLM = registry.dialect_of("vllm-0.33")


@pytest.fixture(scope="module")
def recording() -> Recording:
    return record(engine_factory("numpy"), "core", 3, 3, 40)


@pytest.fixture(autouse=True)
def without_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "REST", 0.0)


class Counting:
    """The NumPy engine, and how often it was asked for its state."""

    def __init__(self, header: Any) -> None:
        self._engine, self.states = engine_factory("numpy")(header), 0

    def __getattr__(self, name: str) -> Any:
        self.states += name == "state"
        return getattr(self._engine, name)


def sink_of(folder: pathlib.Path, recording: Recording) -> tuple[ShadowSink, Counting]:
    sink, made = ShadowSink(folder / "a.jsonl"), Counting(recording.header)
    sink._factory = lambda header: made
    sink.begin(recording.header)
    return sink, made


def say(sink: ShadowSink, recording: Recording, start: int, end: int) -> None:
    for operation, answer in zip(recording.operations[start:end], recording.answers[start:end], strict=True):
        sink.operation(operation, answer)


def case_of(sink: ShadowSink) -> Any:
    return data_in(packed({"case": sink.shown.data()}))["case"]


def is_as_the_engine(case: Any, recording: Recording) -> None:
    """Every moment that is shown is what an engine says that was asked for the same."""
    engine, first = engine_factory("numpy")(recording.header), case["first"]
    looks = set(case["sides"][1]["looks"].tolist())
    for at in range(len(case["operations"].splitlines()) + first + 1):
        if at:
            VLLM.perform(engine, recording.operations[at - 1])
        if at - first in looks:
            state = VLLM.perform(engine, VLLM.log.operations["state"]())
            cells = cells_of(case["sides"][1], at - first).items()
            found = {block: cell for block, cell in cells if cell[0] != FREE}
            assert found == expected(VLLM.snapshot(recording.header, state)), at


@pytest.mark.parametrize("error", [ConfigError("groups", 2, "one group"), AssertionError("no such groups")])
def test_a_configuration_that_the_engine_beside_it_refuses_is_said(
    error: Exception, tmp_path: pathlib.Path, recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache may take groups and refuse them later: where it is made, only `raise` may raise."""

    def refuse(header: Any) -> Any:
        raise error

    for raises in (True, False):
        sink = ShadowSink(tmp_path / "a.jsonl", raises=raises)
        sink._factory = refuse
        with pytest.raises(type(error)) if raises else contextlib.nullcontext():
            sink.begin(recording.header)
    sink.operation(recording.operations[0], recording.answers[0])
    assert (sink.operations, sink.difference) == (0, None)
    sink.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hkv: the live cache cannot be observed: the engine beside it refuses its configuration: ")


def test_nothing_is_kept_and_nothing_asked_unless_somebody_looks(tmp_path: pathlib.Path, recording: Recording) -> None:
    sink, engine = sink_of(tmp_path, recording)
    say(sink, recording, 0, len(recording.operations))
    alone = Counting(recording.header)
    for operation in recording.operations:
        VLLM.perform(alone, operation)
    assert (engine.states, sink.shown._lines, sink.shown._sides) == (alone.states, [], None)


def test_what_is_shown_begins_with_the_first_look(tmp_path: pathlib.Path, recording: Recording) -> None:
    sink, _ = sink_of(tmp_path, recording)
    say(sink, recording, 0, 50)
    case = case_of(sink)
    assert (case["first"], case["operations"], case["headline"]) == (50, "", "after 50 operations: none differs")
    is_as_the_engine(case, recording)
    say(sink, recording, 50, 120)
    case = case_of(sink)
    assert case["headline"] == "operations 51 to 120: none differs"
    assert json.loads(case["operations"].splitlines()[0])["op"] == type(recording.operations[50]).__struct_config__.tag
    assert len(case["sides"][1]["looks"]) == 71
    is_as_the_engine(case, recording)
    assert sink.difference is None


@pytest.mark.parametrize(("limit", "value"), [("MOST", 40), ("TEXT", 2000), ("CHANGES", 20)])
def test_what_is_kept_is_bounded_and_the_newest(
    limit: str, value: int, tmp_path: pathlib.Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, limit, value)
    sink, _ = sink_of(tmp_path, recording)
    assert case_of(sink)["first"] == 0
    most = 0
    for end in range(len(recording.operations)):
        say(sink, recording, end, end + 1)
        most = max(most, len(sink.shown._lines))
        if end % 60 == 0:
            is_as_the_engine(case_of(sink), recording)
    assert most < len(recording.operations) / 2
    case = case_of(sink)
    assert case["first"] + len(case["operations"].splitlines()) == len(recording.operations)
    beside = case["sides"][1]
    used = {beside["keys"][key] for key in beside["changes"]["key"] if key >= 0}
    assert set(beside["keys"]) == used


def test_a_page_that_is_gone_is_forgotten(
    tmp_path: pathlib.Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, engine = sink_of(tmp_path, recording)
    case_of(sink)
    say(sink, recording, 0, 50)
    assert sink.shown._lines
    monkeypatch.setattr(shown, "IDLE", -1.0)
    say(sink, recording, 50, 51)
    asked = engine.states
    say(sink, recording, 51, 52)
    assert (sink.shown._lines, sink.shown._sides, engine.states) == ([], None, asked)
    monkeypatch.setattr(shown, "IDLE", 10.0)
    assert case_of(sink)["first"] == 52


@pytest.mark.parametrize("looking", [True, False])
def test_a_difference_is_shown_whoever_looked(
    looking: bool, tmp_path: pathlib.Path, recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    place = next(
        index for index, answer in enumerate(recording.answers) if index > 60 and getattr(answer, "blocks", None)
    )
    sink = ShadowSink(tmp_path / "a.jsonl")
    sink.begin(recording.header)
    if looking:
        case_of(sink)
    say(sink, recording, 0, place)
    wrong = type(recording.answers[place])([[31], *recording.answers[place].blocks[1:]])
    sink.operation(recording.operations[place], wrong)
    assert "the live cache differs" in capsys.readouterr().err
    case = case_of(sink)
    assert case["headline"] == f"operations 1 to {place + 1:,}: the last one differs"
    assert case["differing"].tolist() == [place]
    assert [mark["line"] for mark in case["marks"]] == [place + 2]
    answers = [side["answers"].splitlines()[place] for side in case["sides"]]
    assert answers[0].startswith('{"blocks":[[31]')
    assert answers[0] != answers[1]
    is_as_the_engine(case, recording)
    sink.close()
    assert (case_of(sink) is not None) == looking or sink.shown._sides is not None


def test_a_session_serves_one_page_of_its_newest_caches(
    tmp_path: pathlib.Path, recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(AttachSettings(folder=str(tmp_path), mode="shadow", serve="127.0.0.1:0"))
    assert "live page" not in capsys.readouterr().err
    sinks = [session.sink(VLLM) for _ in range(shown.MOST_SHOWN + 1)]
    said = capsys.readouterr().err
    assert said.count("live page: http://127.0.0.1:") == 1
    url = said.split("live page: ")[1].split()[0]
    for sink in sinks:
        sink.begin(recording.header)
    with urllib.request.urlopen(f"{url}data?since=0", timeout=10) as answer:
        cases = data_in(answer.read())["cases"]
    assert [case["name"] for case in cases] == [f"{os.getpid()}-{number}" for number in range(2, shown.MOST_SHOWN + 2)]
    session.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_an_address_that_is_taken_leaves_the_caches_as_they_are(
    tmp_path: pathlib.Path, recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Session(AttachSettings(folder=str(tmp_path), mode="shadow", serve="127.0.0.1:0"))
    one.sink(VLLM)
    taken = capsys.readouterr().err.split("http://")[1].split("/")[0]
    other = Session(AttachSettings(folder=str(tmp_path), mode="shadow", serve=taken))
    sink = other.sink(VLLM)
    assert f"hkv: no live page: serve = {taken!r}" in capsys.readouterr().err
    sink.begin(recording.header)
    say(sink, recording, 0, 10)  # type: ignore[arg-type]
    assert other.shadows[0].operations == 10
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("fields", "expected_text"),
    [
        ({"serve": "127.0.0.1:0"}, "mode shadow"),
        ({"serve": "0.0.0.0:80", "mode": "shadow"}, "of this machine alone"),
        ({"serve": "x", "mode": "shadow"}, "of this machine alone"),
    ],
)
def test_bad_addresses(fields: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(ConfigError, match=expected_text):
        settings_of(json.dumps({"folder": "logs", **fields}))


FORKS = """
import multiprocessing, os, sys, urllib.request
from hkv.contract import registry
from hkv.oracle.attach.attach import AttachSettings, Session

session = Session(AttachSettings(folder=sys.argv[1], mode="shadow", serve="127.0.0.1:0"))

def cache():
    session.sink(registry.dialect_of("vllm-0.33"))
    url = session._page._live.url
    assert urllib.request.urlopen(url, timeout=10).status == 200
    print(url, flush=True)

cache()
child = multiprocessing.get_context("fork").Process(target=cache)
child.start()
child.join()
assert child.exitcode == 0
assert urllib.request.urlopen(session._page._live.url, timeout=10).status == 200
session.close()
"""


def test_a_forked_process_serves_a_page_of_its_own(tmp_path: pathlib.Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    urls = ran.stdout.split()
    assert len(set(urls)) == 2
    assert ran.stderr.splitlines() == [f"live page: {url}" for url in urls]
