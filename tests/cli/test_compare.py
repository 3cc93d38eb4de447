"""`hkv compare`: differences of replays add up, whether they were saved or are made now."""

import json
import shutil

import pytest
from click.testing import CliRunner

from hkv.cli import cli
from hkv.errors import ConfigError, FileError
from hkv.replay.attribution import CAUSES
from hkv.replay.compare import compared, most_changed, read_side

GROUPS = ("--engine", "numpy", "--groups", "full:16,swa:16:64")


def run(*arguments):
    done = CliRunner().invoke(cli, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trace, and three replays of it."""
    folder = tmp_path_factory.mktemp("compare")
    trace = str(folder / "trace.jsonl")
    made = ["--requests", "12", "--seed", "1", "--rate", "20", "--prompt-tokens", "60", "--tokens-per-id", "16"]
    run("trace", "chat", *made, "-o", trace)
    paths = [trace]
    for name, options in {
        "small.json": ("--num-blocks", "250"),
        "dense.json": ("--num-blocks", "2000", "--retention", "dense"),
        "large.json": ("--num-blocks", "2000"),
    }.items():
        paths.append(str(folder / name))
        run("replay", trace, *GROUPS, *options, "--json", paths[-1])
    return paths


def test_what_changes_adds_up(saved):
    sides = [read_side(path) for path in saved[1:]]
    result = compared(sides)
    assert result.changes[0].longer
    first_name, first = sides[0]
    for change, (name, other) in zip(result.changes, sides[1:], strict=True):
        assert change.other == 0
        assert change.gained - change.lost == other.totals["hit_tokens"] - first.totals["hit_tokens"]
        assert sum(change.gained_from.values()) == change.gained
        assert sum(change.lost_to.values()) == change.lost
        more = result.requests[name] - result.requests[first_name]
        assert (change.longer, change.shorter) == ((more > 0).sum(), (more < 0).sum())
        most, *_ = most_changed(result, name, 3)
        assert abs(more[most]) == abs(more).max() > 0
    assert sum(result.causes[cause][0] for cause in CAUSES) + result.causes["hit"][0] == first.totals["prompt_tokens"]
    assert compared([sides[0], read_side(saved[2])]).changes[0] == result.changes[0]


def test_refused_requests_hit_nothing_and_count_among_all_prompts(saved, tmp_path):
    """Changes add up to the difference of the totals, and causes to all prompts, where one replay refuses some."""
    trace, *_, large = saved
    paths = [str(tmp_path / "short.json"), str(tmp_path / "tiny.json")]
    run("replay", trace, *GROUPS, "--num-blocks", "2000", "--max-model-len", "200", "--json", paths[0])
    run("replay", trace, *GROUPS, "--num-blocks", "20", "--json", paths[1])
    sides = [read_side(path) for path in (large, *paths)]
    result = compared(sides)
    assert sides[1][1].totals["too_long"]
    assert sides[2][1].totals["never_fit"]
    assert len({side.totals["prompt_tokens"] for _, side in sides}) == 1
    for place, (change, (_, side)) in enumerate(zip(result.changes, sides[1:], strict=True), start=1):
        assert change.other
        assert change.gained - change.lost == side.totals["hit_tokens"] - sides[0][1].totals["hit_tokens"] < 0
        assert sum(change.lost_to.values()) == change.lost
        told = sum(result.causes[cause][place] for cause in ("hit", *CAUSES))
        assert told == result.totals["prompt_tokens"][place]
        assert result.totals["hit_rate"][place] == side.totals["hit_tokens"] / told


def test_a_replay_against_itself(saved, tmp_path):
    again = tmp_path / "again.json"
    shutil.copy(saved[1], again)
    (change,) = compared([read_side(saved[1]), read_side(again)]).changes
    assert (change.longer, change.shorter, change.gained, change.lost, change.other) == (0, 0, 0, 0, 0)
    assert "every hit is the same" in run("compare", saved[1], str(again)).stdout


def test_saved_and_made_replays_are_the_same(saved, tmp_path):
    plot = tmp_path / "both.svg"
    shown = run("compare", saved[1], saved[3], "--plot", str(plot)).stdout
    assert "large.json against small.json:" in shown
    assert "evicted" in shown
    assert b"<svg" in plot.read_bytes()
    stored = json.loads(run("compare", saved[1], saved[3], "--json", "-").stdout)
    options = (saved[0], *GROUPS, "--num-blocks", "250;2000", "--jobs", "1", "--json", "-")
    made = json.loads(run("compare", *options).stdout)
    assert made["replays"] == ["--num-blocks 250", "--num-blocks 2000"]
    assert made["changes"][0] | {"name": ""} == stored["changes"][0] | {"name": ""}
    assert made["totals"] | {"replay": ""} == stored["totals"] | {"replay": ""}


def test_requests_that_were_never_admitted(saved, tmp_path):
    tiny = tmp_path / "tiny.json"
    run("replay", saved[0], *GROUPS, "--num-blocks", "40", "--json", str(tiny))
    (change,) = compared([read_side(saved[1]), read_side(tiny)]).changes
    assert change.other > 0
    assert "admitted by one of the two only" in run("compare", saved[1], str(tiny)).stdout


def test_what_cannot_be_compared_is_refused(saved, tmp_path):
    shorter, broken = tmp_path / "shorter.json", tmp_path / "broken.json"
    run("replay", saved[0], *GROUPS, "--num-blocks", "250", "--limit", "5", "--json", str(shorter))
    with pytest.raises(ConfigError, match=r"shorter\.json"):
        run("compare", saved[1], str(shorter))
    with pytest.raises(ConfigError, match="name of its own"):
        run("compare", saved[1], saved[1])
    for text in ("", "[]", "{}", '{"requests": {}, "totals": {}}', '{"requests": 1, "totals": {}}'):
        broken.write_text(text)
        with pytest.raises(FileError, match=r"broken\.json"):
            run("compare", saved[1], str(broken))
    with pytest.raises(FileError, match="none"):
        run("compare", saved[1], str(tmp_path / "none.json"))
    assert run("compare", saved[1], saved[2], "--retention", "0").exit_code == 2
    assert run("compare", saved[0], *GROUPS, "--num-blocks", "250").exit_code == 2
    assert run("compare", "--json", "-").exit_code == 2
