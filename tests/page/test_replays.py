"""Replays as pages and as traces for Perfetto: both hold what the result says, and no track has two slices at once."""

from __future__ import annotations

import collections
import json

from hkv.page import page
from hkv.replay.attribution import CAUSES
from hkv.replay.pages import GROUPS, POOL, REQUESTS, STEPS, perfetto, replay_data
from hkv.replay.result import result_of
from tests.page.reading import data_of
from tests.page.replayed import replayed


def test_a_page_holds_every_request_with_its_causes() -> None:
    outcome = replayed()
    result = result_of(outcome, "numpy")
    data = data_of(page("x", replay_data(outcome, "numpy", "a cache", "x", 50)))
    assert data["totals"]["hit_tokens"] == sum(data["requests"]["hit"]) > 0
    assert outcome.evictions
    for name in (*data["causes"], "prompt", "hit", "admitted"):
        assert data["requests"][name].tolist() == result.requests[name].tolist()
    missed = sum(data["requests"][cause] for cause in data["causes"])
    assert (data["requests"]["prompt"] - data["requests"]["hit"] == missed).all()
    assert set(data["causes"]) == {cause for cause in CAUSES if result.requests[cause].any()}
    assert data["evicted"] != []
    assert data["time"]["step"].tolist() == result.steps["step"].tolist()


def test_a_trace_has_each_request_once_on_tracks_of_its_own() -> None:
    outcome = replayed()
    result = result_of(outcome, "numpy")
    trace = json.loads(perfetto(outcome, "numpy", 50))
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {REQUESTS, GROUPS, POOL, STEPS}
    # Perfetto's importer wants the unit first, drops a slice without a length and a counter that is no number, and
    # finds the thread that a name is for by its number alone.
    assert next(iter(trace)) == "displayTimeUnit"
    named = {event["tid"]: event["pid"] for event in events if event["name"] == "thread_name"}
    assert {event["tid"]: event["pid"] for event in events if event["ph"] == "X"} == named
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert all(pid == tid for tid, pid in named.items() if tid in processes)
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    assert all(type(each) is int for event in events if event["ph"] == "C" for each in event["args"].values())
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        assert all(end <= start for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False))
    ran = [event for event in events if event["pid"] == REQUESTS and "hit" in event.get("args", {})]
    assert len(ran) == len(result.requests["index"])
    assert sum(event["args"]["hit"] for event in ran) == result.totals["hit_tokens"]
    steps = [event["ts"] for event in events if event["pid"] == STEPS and event["ph"] == "X"]
    assert steps == [50_000 * step for step in result.steps["step"].tolist()]
    held = [event["args"]["held"] for event in events if event["ph"] == "C" and event["name"].startswith("1 ")]
    assert held == result.occupancy["held_1"].tolist()
