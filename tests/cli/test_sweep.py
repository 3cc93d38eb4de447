"""`hkv sweep`: every point is what `hkv replay` finds; earlier points are not replayed again."""

import csv
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.errors import ConfigError, FileError
from hkv.replay import sweep
from hkv.replay import swept as work
from hkv.replay.run import Timing
from hkv.replay.sweep import first_reaching, knee, lines, values
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import read_trace

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "trace.jsonl"
    made = ["trace", "chat", "--requests", "12", "--seed", "1", "--rate", "20", "--prompt-tokens", "60", "--pause", "1"]
    assert (
        CliRunner().invoke(cli, [*made, "--output-tokens", "20", "--tokens-per-id", "16", "-o", str(path)]).exit_code
        == 0
    )
    return str(path)


def run(*arguments):
    done = CliRunner().invoke(cli, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


SWEPT = [
    "--engine",
    "numpy",
    "--groups",
    "full:16;full:16,swa:16:64",
    "--num-blocks",
    "120..900:3",
    "--retention",
    "dense,0",
]


def swept(trace, *more):
    return json.loads(run("sweep", trace, *SWEPT, "--jobs", "1", "--json", "-", *more).stdout)["lines"]


def test_every_point_is_a_replay(trace):
    found = [point for line in swept(trace) for point in line["points"]]
    assert len(found) == 2 * 3 * 2
    assert len({point["hit_tokens"] for point in found}) > 2
    for point in found[::3]:
        options = [word for pair in point["options"].items() for word in pair]
        totals = json.loads(run("replay", trace, "--engine", "numpy", *options, "--json", "-").stdout)["totals"]
        assert {name: totals[name] for name in ("hit_tokens", "evictions", "blocks", "preemptions")} == {
            name: point[name] for name in ("hit_tokens", "evictions", "blocks", "preemptions")
        }


def test_two_sweeps_at_once_write_a_point_once(trace, tmp_path):
    results = tmp_path / "results.jsonl"
    interned = InternedTrace(read_trace(trace))
    sizes = ({"num_blocks": blocks} for blocks in (4, 5))
    points = [work.Point(labels={}, options=options, timing=Timing()) for options in sizes]
    for file in [work.ResultsFile(str(results), interned) for _ in range(2)]:
        for point in points:
            file.add(point, {"hit_rate": 0.5})
    assert len(results.read_bytes().splitlines()) == 2


def test_what_stands_in_the_results_is_not_replayed_again(trace, tmp_path, monkeypatch):
    results = tmp_path / "results.jsonl"
    first = swept(trace, "--results", str(results))
    written = results.read_bytes()
    assert written.count(b"\n") == 12
    results.write_bytes(b"".join(written.splitlines(keepends=True)[:7]))
    replayed = []
    measured = work.measured
    monkeypatch.setattr(work, "measured", lambda point, trace: replayed.append(point) or measured(point, trace))
    assert swept(trace, "--results", str(results)) == first
    assert len(replayed) == 5
    assert sorted(results.read_bytes().splitlines()) == sorted(written.splitlines())
    results.write_bytes(b"no point\n")
    with pytest.raises(FileError, match=r"results.jsonl:1"):
        swept(trace, "--results", str(results))


def test_tables_answers_and_csv(trace, tmp_path):
    out = tmp_path / "points.csv"
    shown = run("sweep", trace, *SWEPT, "--jobs", "1", "--target", "1", "--target", "99", "--csv", str(out)).stdout
    assert "--groups full:16,swa:16:64 --retention 0" in shown
    assert "1%: from " in shown
    assert "99%: not reached" in shown
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["retention"] for row in rows} == {"dense", "0"}
    assert len(rows) == 12
    assert all(0 <= float(row["hit_rate"]) <= 1 for row in rows)


def test_bounds(trace, tmp_path):
    plot = tmp_path / "bounds.svg"
    found = swept(trace, "--bounds", "--plot", str(plot))
    assert [line["line"] for line in found] == list(sweep.lines([row for line in found for row in line["points"]]))
    for line in found:
        rates = [sweep.optimal_rate(row) for row in line["points"] if not row["never_fit"]]
        assert rates == sorted(rates)
        assert all(sweep.optimal_rate(row) >= row["hit_rate"] for row in line["points"])
        assert rates[-1] >= line["infinite"]["hit_rate"] >= line["points"][-1]["hit_rate"]
        assert line["infinite"]["evictions"] == 0
    assert any(rate > row["hit_rate"] for line in found for row in line["points"] for rate in [sweep.optimal_rate(row)])
    assert "at most, by any choice of what to keep" in plot.read_text()
    shown = run("sweep", trace, *SWEPT, "--jobs", "1", "--bounds").stdout
    assert "infinite: " in shown
    assert "--max-num-batched-tokens 8192 --max-num-seqs 256 --prefix-cache-retention-interval 0" in " ".join(
        shown.split()
    )
    assert "gap" in shown


def test_an_infinite_pool_is_replayed_only_where_something_was_evicted(trace, monkeypatch):
    replayed, measured = [], work.measured
    monkeypatch.setattr(work, "measured", lambda point, trace: replayed.append(point) or measured(point, trace))
    few = ("--engine", "numpy", "--groups", "full:16", "--jobs", "1", "--bounds", "--json", "-")
    (small,) = json.loads(run("sweep", trace, *few, "--num-blocks", "120;329").stdout)["lines"]
    assert [point.infinite for point in replayed] == [False, False, True]
    (large,) = json.loads(run("sweep", trace, *few, "--num-blocks", "329;900").stdout)["lines"]
    assert len(replayed) == 5
    assert large["infinite"]["hit_tokens"] == small["infinite"]["hit_tokens"] == large["points"][-1]["hit_tokens"]


@pytest.mark.parametrize(
    ("option", "text", "found"),
    [
        ("--memory", "16GiB..1TiB:3", [str(16 * 2**30), str(128 * 2**30), str(2**40)]),
        ("--num-blocks", "10..1000:3", ["10", "100", "1000"]),
        ("--num-blocks", "10;20", ["10", "20"]),
        ("--retention", "dense, 0", ["dense", "0"]),
    ],
)
def test_values(option, text, found):
    assert values(option, text) == found


@pytest.mark.parametrize("text", ["10..20", "10..20:1", "20..10:3", "x..20:3", "10..99999999999:3", "..:2"])
def test_ranges_that_are_none(text):
    with pytest.raises(ConfigError, match="--num-blocks"):
        values("--num-blocks", text)


def test_an_impossible_point_is_refused_before_any_is_replayed(trace, monkeypatch):
    monkeypatch.setattr(work, "measured", lambda *_: pytest.fail("replayed"))
    with pytest.raises(ConfigError, match="retention"):
        run("sweep", trace, "--groups", "full:16", "--num-blocks", "20;30", "--retention", "dense,7")


def rows(*pairs):
    return [{"options": {"--num-blocks": str(size)}, "hit_rate": rate} for size, rate in pairs]


def test_knee_and_targets():
    line = rows((100, 0.1), (200, 0.5), (400, 0.55), (800, 0.6))
    assert knee(line) is line[1]
    assert first_reaching(line, 0.55) is line[2]
    assert first_reaching(line, 0.7) is None
    assert knee(rows((100, 0.1), (200, 0.2))) is None
    assert knee(rows((100, 0.1), (200, 0.1), (400, 0.1))) is None
    assert lines(list(reversed(line))) == {"": line}


def test_requests_that_a_pool_refuses_count_for_every_point(tmp_path):
    """Three short prompts that are shared, and a long one that the smallest pool refuses: it does not seem the best."""
    lines = [{"timestamp": 100 * i, "input_length": 64, "output_length": 1, "hash_ids": [0, 1]} for i in range(3)]
    lines += [{"timestamp": 400, "input_length": 640, "output_length": 1, "hash_ids": list(range(2, 22))}]
    path, plot = tmp_path / "trace.jsonl", tmp_path / "plot.svg"
    path.write_text("".join(json.dumps({**line, "tokens_per_id": 32}) + "\n" for line in lines))
    asked = ("sweep", str(path), "--engine", "numpy", "--groups", "full:16", "--num-blocks", "8;60", "--jobs", "1")
    (line,) = json.loads(run(*asked, "--json", "-", "--plot", str(plot)).stdout)["lines"]
    small, large = line["points"]
    assert (small["never_fit"], large["never_fit"]) == (1, 0)
    assert small["prompt_tokens"] == large["prompt_tokens"] == 3 * 64 + 640
    assert small["hit_tokens"] == large["hit_tokens"] == 2 * 48
    assert small["hit_rate"] == large["hit_rate"] == 96 / 832
    assert "1 refused" in plot.read_text()
    shown = run(*asked).stdout
    assert "refused" in shown
    assert "highest: 11.54%, with 8 blocks, 1 request refused" in shown


@pytest.mark.parametrize("warmup", ["2", "50%"])
def test_requests_of_a_warmup_do_not_count(tmp_path, warmup):
    lines = [{"timestamp": 100 * i, "input_length": 64, "output_length": 1, "hash_ids": [0, 1]} for i in range(4)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({**line, "tokens_per_id": 32}) + "\n" for line in lines))
    asked = (str(path), "--engine", "numpy", "--groups", "full:16", "--num-blocks", "60", "--warmup", warmup)
    (line,) = json.loads(run("sweep", *asked, "--jobs", "1", "--bounds", "--json", "-").stdout)["lines"]
    (point,) = line["points"]
    assert (point["hit_tokens"], point["prompt_tokens"], point["hit_rate"]) == (96, 128, 0.75)
    assert point["optimal_tokens"] == line["infinite"]["hit_tokens"] == 96
    found = json.loads(run("replay", *asked, "--json", "-").stdout)
    assert (found["totals"]["hit_tokens"], found["totals"]["prompt_tokens"], found["totals"]["warmup"]) == (96, 128, 2)
    assert sum(found["missed"]["tokens"].values()) == 32
    assert found["requests"]["last token"] == [0, 0, 1, 1]


@pytest.mark.parametrize("warmup", ["4", "100%", "-1", "half", "1.5%"])
def test_a_warmup_that_leaves_nothing_is_refused(trace, warmup):
    with pytest.raises(ConfigError, match="warmup"):
        run("replay", trace, "--engine", "numpy", "--groups", "full:16", "--num-blocks", "60", "--limit", "4",
            "--warmup", warmup)  # fmt: skip


@dataclasses.dataclass
class Note:
    """A point whose work is to say in which process it is done, and to go on for long."""

    path: str
    compiled = False


def note_and_sleep(note, trace):
    pathlib.Path(note.path).write_text(str(os.getpid()))
    time.sleep(300)


def test_workers_end_with_the_process_that_started_them(tmp_path):
    """However that ends: killed, it has no time to tell them."""
    code = """
        import sys
        from hkv.replay.swept import at_once
        from hkv.replay.traces.interned import InternedTrace
        from tests.cli.test_sweep import Note, note_and_sleep
        if __name__ == "__main__":
            list(at_once(note_and_sleep, list(map(Note, sys.argv[1:])), InternedTrace([]), 2))
    """
    script, notes = tmp_path / "script.py", [tmp_path / "first", tmp_path / "second"]
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, script, *notes], env=environment, stderr=subprocess.DEVNULL)
    assert waited(lambda: all(note.exists() and note.read_text() for note in notes))
    workers = [int(note.read_text()) for note in notes]
    process.kill()
    process.wait()
    assert waited(lambda: not any(map(runs, workers))), "processes are left"


def waited(condition):
    """True as soon as the condition holds, False if it does not for a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def runs(number):
    """True if there is such a process, and it has not ended yet."""
    try:
        os.kill(number, 0)
        return "(zombie)" not in pathlib.Path(f"/proc/{number}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
