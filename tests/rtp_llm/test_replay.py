"""`hkv replay` under RTP-LLM's rules: the schedule by hand, hits by their definition, and what the command refuses."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Sequence
from typing import Any

import pytest

from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import NAMES, RtpConfig
from hkv.dialects.rtp_llm.schedule.agreement import RtpDiagnosis, RtpRecorder
from hkv.dialects.rtp_llm.schedule.run import RtpReplay, RtpReplayedCache, rtp_cache
from hkv.oracle.engines import engine_factory
from hkv.replay.observed import COMPLETE
from hkv.replay.schedule import Arrival, Schedule
from hkv.spec import spec_from_text
from tests.cli.commands import run

SINGLE, HYBRID, POOLS = NAMES
STATE = structs.StateOp()
MODELS = pathlib.Path(__file__).parents[1] / "data" / "models"


def replayed(monkeypatch: Any, capsys: Any, path: str, *arguments: str) -> dict[str, Any]:
    """By the NumPy engine, which compiles nothing; `test_compiled_replay.py` holds the compiled one against it."""
    how = ("--tokens-per-id", "4", "--engine", "numpy", "--json", "-")
    code, out, err = run(monkeypatch, capsys, "replay", path, *how, *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_prompt_is_hit_when_its_request_has_finished(monkeypatch, capsys, trace) -> None:
    """Three times the same eight tokens: beside the first, which generates for two steps, and after it."""
    path = trace((0, [0, 1], 8, 4), (1, [0, 1], 8, 1), (9, [0, 1], 8, 1))
    found = replayed(monkeypatch, capsys, path, "--dialect", SINGLE, "--groups", "full:2", "--num-blocks", "40")
    assert found["requests"]["hit"] == [0, 0, 6], "the last key is never looked for"
    assert found["requests"]["not computed yet"] == [0, 6, 0]
    assert found["groups"][0]["reasons"]["nothing to find"] == 3
    # Two tokens a step are generated after the prompt's; 8 + 2 tokens in 5 blocks are entered, of the second nothing.
    assert (found["totals"]["blocks_cached_peak"], found["totals"]["blocks_not_cached_twice"]) == (5, 4 + 1)
    assert found["totals"]["verdicts"] == {"admission": {"granted": 3}, "growth": {"granted": 1}}
    assert found["requests"]["ended"] == [1, 1, 9]


def test_whole_prompts_get_blocks_at_once_and_are_computed_within_the_budget(monkeypatch, capsys, trace) -> None:
    path = trace((0, [0, 1, 2, 3], 16, 1), (0, [9], 4, 1))
    arguments = ("--dialect", SINGLE, "--groups", "full:4", "--num-blocks", "40", "--step-tokens", "6")
    found = replayed(monkeypatch, capsys, path, *arguments)
    assert found["steps"]["in_use"] == [4, 4, 5, 1]
    assert found["requests"]["ended"] == [2, 3], "6 + 6 + 4 tokens, the second's first two beside the last four"


def test_what_never_fits_is_refused_for_good_and_what_may_fit_waits(monkeypatch, capsys, trace) -> None:
    path = trace((0, [0, 1, 2, 3, 4, 5], 24, 1), (0, [6, 7], 8, 5), (0, [8, 9, 10], 12, 1))
    arguments = ("--dialect", SINGLE, "--groups", "full:4", "--num-blocks", "5", "--reserve-ratio", "0")
    found = replayed(monkeypatch, capsys, path, *arguments)
    assert found["totals"]["verdicts"]["admission"] == {
        "granted": 2,
        "permanent": 1,
        "retryable": found["totals"]["put_off"],
    }
    assert (found["totals"]["never_fit"], found["totals"]["finished"]) == (1, 2)
    assert found["totals"]["put_off"] > 0
    reserved = replayed(monkeypatch, capsys, path, *arguments[:-1], "60")
    assert reserved["totals"]["verdicts"]["admission"]["permanent"] == 2, "2 of 4 blocks are left free"


def test_a_preempted_requests_work_is_lost(monkeypatch, capsys, trace) -> None:
    """Two grow into the last blocks; the later one gives all up, is entered nowhere and comes back without a hit."""
    path = trace((0, [0, 1], 8, 9), (0, [2, 3], 8, 9))
    arguments = ("--dialect", SINGLE, "--groups", "full:4", "--num-blocks", "6", "--reserve-ratio", "0")
    found = replayed(monkeypatch, capsys, path, *arguments)
    assert found["requests"]["preemptions"] == [0, 1]
    assert found["requests"]["recomputed"][1] > 8
    assert found["requests"]["recovered"] == [0, 0]
    assert found["totals"]["verdicts"]["growth"]["internal_error"] == 1


def test_states_lie_on_the_grid_and_at_the_end(monkeypatch, capsys, trace) -> None:
    path = trace((0, [0, 1, 2, 3, 4, 5], 24, 1), (9, [0, 1, 2, 3, 4, 6], 24, 1))
    arguments = ("--dialect", HYBRID, "--groups", "full:4,mamba:4", "--num-blocks", "40", "--linear-step")
    assert replayed(monkeypatch, capsys, path, *arguments, "1")["requests"]["hit"] == [0, 20]
    found = replayed(monkeypatch, capsys, path, *arguments, "2")
    assert found["requests"]["hit"] == [0, 16]
    full, state = (group["reasons"] for group in found["groups"])
    assert (full["had it"], state["retired window"]) == (1, 1)
    assert found["requests"]["not retained"] == [0, 4]
    off = replayed(monkeypatch, capsys, path, *arguments, "1", "--no-caching")
    assert off["requests"]["hit"] == [0, 0]
    assert off["requests"]["caching is off"] == [0, 20]
    assert off["steps"]["in_use"][0] == 6 + 1, "one state without reuse"


def draw(rng: random.Random) -> tuple[RtpConfig, Schedule, list[Arrival]]:
    """A small cache and requests over few prefixes."""
    size = rng.choice([2, 4])
    dialect, groups = rng.choice([
        (SINGLE, "full:{}"), (HYBRID, "full:{},mamba:{}"), (POOLS, "mamba:{},full:{}"), (POOLS, "full:{},swa:{}:{}"),
        (POOLS, "full:{}"),
    ])  # fmt: skip
    config = rtp_cache(
        dialect,
        [spec_from_text(text) for text in groups.replace("{}", str(size)).split(",")],
        [rng.choice([12, 20, 40])],
        linear_step=rng.choice([1, 2, 3]),
        reserve_ratio=rng.choice([0, 5, 20]),
        prefix_tree=rng.random() < 0.5,
        independent_eviction=rng.random() < 0.5,
    )
    prefixes = [[100 * which + i for i in range(20)] for which in range(3)]
    arrivals, fresh = [], 1000
    for index in range(25):
        kept = rng.choice(prefixes)[: rng.randint(0, 8)]
        prompt, output = max(1, len(kept) * size + rng.randint(-1, 9)), rng.randint(0, 9)
        keys = [*kept[: prompt // size], *range(fresh, fresh + 20)]
        fresh += 20
        asked = (prompt - 1) // size * size
        arrivals.append(Arrival(index, index // 2, prompt, output, lambda keys=keys: keys, asked=asked))
    schedule = Schedule(
        step_tokens=rng.choice([8, 40]),
        decode_tokens=rng.choice([1, 2]),
        max_running=rng.choice([2, 8]),
        lookahead=rng.choice([0, 0, 2]),
        max_model_len=60,
    )
    return config, schedule, arrivals


class AskingAlways(RtpReplay):
    """Leaves no allocation out, as RTP-LLM does."""

    def _slots(self, tokens: int) -> tuple[int, ...]:
        return (tokens,)


def longest(diagnosis: RtpDiagnosis, keys: Sequence[int]) -> int:
    """The longest prefix of `keys` whose groups lack nothing, in keys."""
    size = diagnosis._config.block_size
    for count in range(len(keys), 0, -1):
        computed, told = diagnosis.miss_reasons(keys, 0, count * size)
        if computed == count * size and all(each.reason in COMPLETE for each in told):
            return count
    return 0


class Definition(RtpRecorder):
    """Also holds hits to their definition."""

    size = 0
    expected = 0
    hits = 0

    def admitted(self, step: int, live: Any, hit: Any) -> None:
        super().admitted(step, live, hit)
        assert hit == self.expected
        self.hits += hit > 0

    def asked(self, live: Any) -> None:
        super().asked(live)
        diagnosis, size = self._diagnosis, self.size
        assert isinstance(diagnosis, RtpDiagnosis)
        self.expected = longest(diagnosis, live.keys[: (live.tokens - 1) // size]) * size


def test_allocations_left_out_change_nothing_and_hits_are_the_longest() -> None:
    hits = preempted = 0
    for seed in range(40):
        config, schedule, arrivals = draw(random.Random(seed))
        records = []
        for kind in (RtpReplay, AskingAlways):
            engine = RtpReplayedCache(config).engine("numpy", engine_factory("numpy"))
            diagnosis = RtpDiagnosis(config, engine, caching=True)  # type: ignore[arg-type]
            recorder = Definition(config, diagnosis, None, lambda: None)
            recorder.size = config.block_size
            steps = kind(engine, config.block_size, True, schedule, arrivals, recorder).run()
            records.append((steps, recorder.requests, recorder.steps, engine.perform(STATE)))
            hits += recorder.hits
            preempted += sum(request.preemptions for request in recorder.requests.values())
        assert records[0] == records[1]
        assert all(request.outcome for request in records[0][1].values())
        assert records[0][3].lists == {}
        assert not any(pool.request or pool.connector for pool in records[0][3].pools), "every block is given back"
    assert hits > 100
    assert preempted > 0


@pytest.mark.parametrize(
    ("dialect", "name", "pools"),
    [(SINGLE, "llama", "shared"), (POOLS, "qwen3_next", "independent"), (POOLS, "deepseek_v4", "independent")],
)
def test_planned_models(monkeypatch, capsys, trace, dialect: str, name: str, pools: str) -> None:
    path = trace((0, list(range(200)), 800, 3), (9, list(range(200)), 800, 3))
    asked = (str(MODELS / f"{name}.json"), "--memory", "8GiB", "--dialect")
    _, planned, _ = run(monkeypatch, capsys, "plan", *asked, "rtp-llm", "--pools", pools, "--json", "-")
    plan = json.loads(planned)
    found = replayed(monkeypatch, capsys, path, "--model", *asked, dialect)
    counts = [group["num_blocks"] for group in plan["groups"]] if pools == "independent" else [plan["num_blocks"]]
    assert found["totals"]["blocks"] == sum(counts) - len(counts)
    assert len(found["groups"]) == len(plan["groups"])
    size = 256 if name == "deepseek_v4" else 64
    assert found["requests"]["hit"] == [0, 799 // size * size]


def test_without_hits_a_wide_window_keeps_what_it_reads(monkeypatch, capsys, trace) -> None:
    path = trace((0, [0], 4, 60), (0, list(range(10)), 37, 9))
    arguments = ("--dialect", POOLS, "--groups", "full:4,swa:4:12", "--num-blocks", "40,40", "--no-caching")
    found = replayed(monkeypatch, capsys, path, *arguments)
    assert found["totals"]["finished"] == 2
    for window in range(1, 30):
        config = rtp_cache(POOLS, [spec_from_text("full:4"), spec_from_text(f"swa:4:{window}")], [60], caching=False)
        engine, spec = RtpReplayedCache(config).engine("numpy", engine_factory("numpy")), config.topology.specs[1]
        engine.request_keyed("a", 1, list(range(40)), 0)
        for tokens in range(1, 80):
            answer = engine.perform(structs.MallocOp(id="a", reuse=False, device_cache=False))
            read = {position // 4 for position in spec.readable(tokens) if position < tokens}
            assert isinstance(answer, structs.Malloc)
            assert all(answer.lists[0][1][block] > 0 for block in read), "the next query reads no hole"
            engine.extend("a", 1)


def test_models_that_hits_would_leave_without_a_chunk_are_refused(monkeypatch, capsys, trace) -> None:
    """Before the first request; blocks of a chunk each are replayed, and a chunk is kept whole without hits."""
    path = trace((0, [0], 8192, 1), (1, [0, 1], 8193, 1))
    line = ("replay", path, "--dialect", POOLS, "--model", "llama-4-scout", "--memory", "80GiB", "--engine", "numpy")
    code, _, err = run(monkeypatch, capsys, *line)
    assert code == 2
    assert "model = 'chunk 8192'" in err
    assert "--block-size 8192, or --no-caching" in err
    more = ("--tokens-per-id", "8192", "--json", "-", "--max-model-len", "20000")
    for changed, hit in (("--block-size", "8192"), [0, 8192]), (("--no-caching",), [0, 0]):
        code, out, err = run(monkeypatch, capsys, *line, *more, *changed)
        assert code == 0, err
        assert json.loads(out)["requests"]["hit"] == hit


def test_pools_apart_share_the_reserve_and_do_not_ask_for_its_sum_again(monkeypatch, capsys, tmp_path) -> None:
    """gpt-oss-20b in pools of 26 blocks: hits and preemptions as RTP-LLM's own allocator has them under this schedule.

    Asked for the sum of the reserve as well, requests wait that RTP-LLM admits: 12,288 tokens hit, 6 preemptions.
    """
    memory = ("--model", "gpt-oss-20b", "--memory", "160MiB", "--block-size", "128", "--max-model-len", "4096")
    options = ("--dialect", POOLS, "--engine", "numpy", "--json", "-")
    chats = str(tmp_path / "chats.jsonl")
    assert run(monkeypatch, capsys, "trace", "chat", "-o", chats, "--requests", "60", "--seed", "1")[0] == 0
    code, out, err = run(monkeypatch, capsys, "replay", chats, *memory, *options)
    assert (code, err) == (0, "")
    totals = json.loads(out)["totals"]
    assert (totals["hit_tokens"], totals["preemptions"]) == (9728, 8)


def test_what_operators_see_is_in_the_json(monkeypatch, capsys, trace) -> None:
    path = trace((0, [0, 1], 8, 1), (1000, [0, 1, 2], 9, 1))
    more = ("--groups", "full:4,swa:4:4", "--num-blocks", "9,5", "--reserve-ratio", "10")
    found = replayed(monkeypatch, capsys, path, "--dialect", POOLS, *more)["monitored"]
    assert [(each["tags"], each["total"], each["cached"]) for each in found["pools"]] == [
        (["full0"], 8, 2),
        (["swa1"], 4, 2),
    ]
    assert [(each["free"], each["available"], each["reserved"]) for each in found["pools"]] == [(6, 8, 0), (2, 4, 0)]
    assert found["cache"]["cached_keys"] == 2
    assert (found["cache"]["total_tokens"], found["cache"]["available_tokens"]) == (16, 16)
    assert found["recent_keys"] == {"keys": 4, "hits": 2, "retained": 4, "retained_unique": 2, "hit_ratio": 0.5}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--dialect", SINGLE, "--groups", "full:4,full:4", "--num-blocks", "9"], "expected rtp-llm/hybrid"),
        (["--dialect", SINGLE, "--groups", "full:4", "--num-blocks", "9", "--eagle", "all"], "--eagle is not for"),
        (
            ["--dialect", SINGLE, "--groups", "full:4", "--num-blocks", "9", "--retention", "0"],
            "--retention is not for",
        ),
        (["--dialect", SINGLE, "--groups", "full:4", "--num-blocks", "9", "--engine", "no.such:Engine"], "no.such"),
        (
            ["--dialect", SINGLE, "--groups", "full:4", "--num-blocks", "9", "--check", "--engine", "numpy"],
            "other than numpy",
        ),
        (["--dialect", HYBRID, "--groups", "full:4,swa:4:64", "--num-blocks", "9"], "bring one block of a window"),
        (["--dialect", HYBRID, "--groups", "full:4,chunked:4:64", "--num-blocks", "9"], "full, mla, swa or mamba"),
        (["--dialect", HYBRID, "--groups", "full:4,mamba:8", "--num-blocks", "9"], "a block for each cache key"),
        (["--dialect", POOLS, "--groups", "full:4,mamba:4", "--num-blocks", "9,9,9"], "one number a pool"),
        (["--dialect", HYBRID, "--groups", "full:4,mamba:4", "--num-blocks", "1"], "num-blocks"),
        (["--groups", "full:4", "--num-blocks", "9,9"], "vLLM having one pool"),
        (["--groups", "full:4", "--num-blocks", "9", "--prefix-tree"], "--prefix-tree is not for --dialect vllm-0.33"),
        (
            ["--groups", "full:4", "--num-blocks", "9", "--linear-step", "2"],
            "--linear-step is not for --dialect vllm-0.33",
        ),
    ],
)
def test_what_does_not_make_sense_is_refused_by_name(monkeypatch, capsys, trace, arguments, told) -> None:
    path = trace((0, [0], 4, 1))
    code, out, err = run(monkeypatch, capsys, "replay", path, "--tokens-per-id", "4", *arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_check_stops_at_the_first_difference(monkeypatch, capsys, trace) -> None:
    path = trace((0, [0, 1], 8, 1))
    arguments = ("--dialect", SINGLE, "--groups", "full:4", "--num-blocks", "9", "--tokens-per-id", "4", "--check")
    engine = "tests.rtp_llm.test_commands:"
    code, _, err = run(monkeypatch, capsys, "replay", path, *arguments, "--engine", f"{engine}Largest")
    assert code == 1
    assert "operation 2, malloc of request 0: lists[0][0] differs" in err
    code, out, err = run(monkeypatch, capsys, "replay", path, *arguments, "--engine", f"{engine}Forgetful")
    assert (code, err) == (0, ""), "with one group it does nothing wrong"
    assert "1 granted" in out
