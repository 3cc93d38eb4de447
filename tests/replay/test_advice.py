"""Each sentence of advice is a command: with the options that it names, `hkv replay` finds what it says.

Drawn over dialects, groups, pools and schedules, with and without a second tier; a plan of a model has its own options.
"""

import contextlib
import json
import math
import pathlib
import random
import re
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks import causes as proofs
from hkv.cli import cli
from hkv.errors import HKVError
from hkv.replay.attribution import CAUSES
from hkv.replay.verb import replay_trace, sweep
from hkv.spec import spec_from_text

SENTENCE = re.compile(r"([^:]*?) \((--[^)]*)\)(?: hits|:) ([0-9.]+)%(?:, (more|less|the same))?")
"""The change, the options that make it, the rate that they hit, and how that compares."""

TIERS = (
    "",
    "--offload 40",
    "--offload 300 --offload-policy arc",
    "--offload 300 --offload-store-threshold 2",
    "--offload 300 --offload-decode",
    "--offload 200 --offload-kind lmcache --offload-chunk-tokens 16",
)

MADE = {
    "vllm-0.33": {
        "A pool that evicts nothing",
        "Dense retention",
        "Blocks of",
        "Offloading without vLLM's defects",
        "A tier that evicts nothing",
        "No second tier",
    },
    "rtp-llm/single": {"A pool that evicts nothing"},
    "rtp-llm/hybrid": {"A pool that evicts nothing", "States kept at every block"},
    "rtp-llm/hybrid-pool": {"A pool that evicts nothing"},
    "sglang-0.5.23": {"A pool that evicts nothing"},
}
"""Changes of each dialect, all of which the draws meet."""


def command_of(seed: int) -> str:
    """Options of a drawn replay."""
    source = random.Random(seed)
    dialect, text, (least, most) = proofs.CACHES[seed % len(proofs.CACHES)]
    blocks, words = source.randint(least, most), [f"--dialect {dialect} --groups {text} --engine numpy"]
    pools = f"{blocks},{40 if 'mamba' in text else blocks // 2}" if dialect.startswith("sglang") and "," in text else ""
    words += [f"--num-blocks {pools or blocks}", f"--step-tokens {source.choice((16, 64))}"]
    words += ["--max-running 8 --max-model-len 240", f"--closed-loop {source.choice((0, 0, 3))}"]
    if dialect == "vllm-0.33":
        words += [f"--retention {source.choice(('dense', '0', '0', '32' if 'swa' in text else '0'))}"]
        words += [source.choice(TIERS)]
        words += ["--prefix-match-unit 2"] if source.random() < 0.2 and "," in text else []
    elif "mamba" in text and dialect.startswith("rtp"):
        words += [f"--linear-step {source.choice((1, 2, 4))}"]
    return " ".join(words)


def written(seed: int, folder: pathlib.Path) -> str:
    """Path of a drawn trace."""
    path = folder / f"{seed}.jsonl"
    path.write_bytes(
        b"".join(
            msgspec.json.encode(
                {
                    "timestamp": each.timestamp,
                    "tokens": list(each.tokens),
                    "output_length": each.output_length,
                    "output_tokens": list(each.output_tokens),
                }
            )
            + b"\n"
            for each in proofs.drawn(seed).trace.requests
        )
    )
    return str(path)


def replayed(words: str) -> dict:
    done = CliRunner().invoke(cli, f"replay {words} --json -")
    assert done.exit_code == 0, (words, done.output)
    return json.loads(done.stdout)


def hold(words: str) -> set[str]:
    """Holds each sentence of a replay's advice to the command that it names; returns what they change."""
    first, met = replayed(f"{words} --ceilings"), set()
    mine = first["totals"]["hit_rate"]
    rates: dict[float, list[str]] = {mine: []}
    for sentence in first["advice"]:
        said = SENTENCE.search(sentence)
        assert bool(said) == bool(re.search(r"(hits|:) [0-9.]+%", sentence)), sentence
        if said is None:
            continue
        change, options, figure, word = said.groups()
        found = replayed(f"{words} {options}")["totals"]
        assert f"{found['hit_rate']:.2%}" == f"{figure}%", (words, sentence)
        compared = "more" if found["hit_rate"] > mine else "less" if found["hit_rate"] < mine else "the same"
        assert word in (None, compared), (words, sentence)
        if "evicts nothing" in sentence and "still" not in sentence:
            assert found["tier_evicted" if "tier" in change else "evictions"] == 0, (words, sentence)
        if word:
            rates.setdefault(found["hit_rate"], []).append(change)
            met.add(change)
    best = rates[max(rates)]
    if len(met) > 1:
        which = "this" if len(best) == 1 else "each of these"
        most = f"Most is found by {which}: {'; '.join(best)}."
        assert first["advice"][-1] == (most if max(rates) > mine else "None of these finds more.")
    assert all(each["options"] for each in first["ceilings"])
    assert len(first["ceilings"]) == len(met), (words, first["advice"])
    return met


def test_each_sentence_of_advice_is_a_command(tmp_path: pathlib.Path) -> None:
    met: dict[str, set[str]] = {dialect: set() for dialect in MADE}
    for seed in range(2 * len(proofs.CACHES)):
        words = command_of(seed)
        met[words.split()[1]].update(hold(f"{written(seed, tmp_path)} {words}"))
    for dialect, changes in MADE.items():
        assert all(any(change in each for each in met[dialect]) for change in changes), (dialect, met[dialect])


def test_a_tier_stays_when_something_else_is_changed() -> None:
    """Ten prompts in turn through a pool that holds four of them, and a tier that holds all."""
    words = "--groups full:64,swa:64:128 --num-blocks 40 --offload 400 --engine numpy"
    hold(f"tests/data/traces/ceilings_tier.jsonl {words}")
    (dense,) = (
        each
        for each in replayed(f"tests/data/traces/ceilings_tier.jsonl {words} --ceilings")["ceilings"]
        if each["options"] == {"retention": "dense"}
    )
    assert f"{dense['hit_rate']:.2%}" == "61.11%"


@pytest.mark.parametrize(
    "words",
    [
        "--groups full:64,swa:64:128 --num-blocks 9000 --offload 9000",
        "--groups full:64,swa:64:128 --num-blocks 9000",
        "--dialect sglang-0.5.23 --groups full:64,swa:64:128 --num-blocks 9000",
        "--dialect rtp-llm/hybrid-pool --groups full:64,swa:64:64 --num-blocks 9000,9000",
    ],
)
def test_a_cache_that_is_large_enough_is_made_no_smaller_and_still_has_its_command(words: str) -> None:
    words = f"tests/data/traces/ceilings_tier.jsonl {words} --engine numpy"
    assert hold(words)
    for each in replayed(f"{words} --ceilings")["ceilings"]:
        sizes = [
            int(size) for name in ("num_blocks", "offload") for size in each["options"].get(name, "").split(",") if size
        ]
        if "evicts nothing" in each["change"]:
            assert sizes
            assert sum(sizes) >= 9000, each


def test_changes_that_find_equally_much_are_all_named() -> None:
    """A pool without evictions finds all that there is, as does a tier that has room for it."""
    words = "--groups full:64,swa:64:128 --num-blocks 40 --offload 30 --engine numpy"
    (*_, said) = replayed(f"tests/data/traces/ceilings_tier.jsonl {words} --ceilings")["advice"]
    assert said == "Most is found by each of these: A pool that evicts nothing; A tier that evicts nothing."


def test_advice_on_a_plan_of_a_model_is_in_its_options(tmp_path: pathlib.Path) -> None:
    words = "--model tests/data/models/gemma3_text.json --block-size 16 --max-model-len 256 --engine numpy"
    for tier in ("", "--offload 64MiB"):
        assert hold(f"{written(4, tmp_path)} {words} --memory 96MiB {tier}")


def test_a_call_takes_a_tier_as_the_command_does() -> None:
    groups, trace = [spec_from_text("full:64"), spec_from_text("swa:64:128")], "tests/data/traces/ceilings_tier.jsonl"
    found = replay_trace(trace, groups, 40, engine="numpy", dialect_options={"offload": "400", "retention": "dense"})
    assert f"{found.totals['hit_rate']:.2%}" == "61.11%"


def test_coarse_ids_warn_where_windows_are_kept_and_say_what_finer_ones_can_hit_at_most(tmp_path: pathlib.Path) -> None:
    words = "--num-blocks 4000 --engine numpy"
    for groups, hybrid in (("full:16,swa:16:128", True), ("full:16", False)):
        rates, said = {}, {}
        for size in (512, 16):
            path = str(tmp_path / f"{size}.jsonl")
            made = f"trace chat -o {path} --requests 60 --tokens-per-id {size} --seed 3"
            assert CliRunner().invoke(cli, made).exit_code == 0
            found = replayed(f"{path} --groups {groups} {words}")
            rates[size], said[size] = found["totals"]["hit_rate"], found
        assert bool(said[512]["warnings"]) == hybrid
        assert not said[16]["warnings"]
        bounds = re.findall(r"finer ones may hit up to ([0-9.]+)% in all", " ".join(said[512]["advice"]))
        assert bool(bounds) == hybrid
        if hybrid:
            assert rates[512] < rates[16] <= float(bounds[0]) / 100 + 0.0005
            gain = (rates[16] - rates[512]) * said[512]["totals"]["prompt_tokens"]
            assert gain > 0


def test_a_sweep_over_tiers_is_one_line_by_their_sizes(tmp_path: pathlib.Path) -> None:
    trace = "tests/data/traces/ceilings_tier.jsonl --groups full:64,swa:64:128 --num-blocks 40 --engine numpy"
    files = f"--csv {tmp_path / 'a.csv'} --html {tmp_path / 'a.html'}"
    (line,) = swept(f"{trace} --offload 0,40,100,400 --bounds {files}")["lines"]
    alone, *tiers = line["points"]
    assert (line["line"], line["size"]) == ("", "chunks")
    assert [row["options"] for row in line["points"]] == [{"--offload": size} for size in ("0", "40", "100", "400")]
    assert alone["hit_rate"] == replayed(trace)["totals"]["hit_rate"]
    assert alone["loaded_tokens"] == 0 < tiers[0]["loaded_tokens"]
    assert (tmp_path / "a.csv").read_text().startswith("offload,hit_rate,")
    shown = said(f"sweep {trace} --offload 0,100,400")
    assert shown.count("chunks ┃") == shown.count("highest: ") == shown.count("│   none │") == 1
    both = swept(f"{trace.replace('40 ', '40;60 ')} --offload 0,400")["lines"]
    assert [(each["line"], each["size"]) for each in both] == [("--offload 0", "blocks"), ("--offload 400", "blocks")]
    bare = swept(f"{trace} --offload 0,400 --retention dense,0")["lines"]
    assert [each["line"] for each in bare] == ["--retention dense", "--retention 0"]


def test_a_sweep_over_tiers_of_a_model_is_in_bytes_and_drawn_so(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    words = "--model tests/data/models/gemma3_text.json --memory 40MiB --max-model-len 256 --engine numpy"
    words = f"{written(4, tmp_path)} {words} --offload 0,33554432,512MiB"
    shown = said(f"sweep {words}")
    assert re.search(r"none │.*\n.* 32 MiB │.*\n.* 512 MiB │", shown)
    assert re.search(r"highest: .*, with .* of host memory\n", shown)
    assert "last row as vllm serve" in shown
    assert "--kv-offloading-size 0.5" in " ".join(shown.split())
    said(f"sweep {words} --plot {tmp_path / 'a.svg'}")
    drawn = (tmp_path / "a.svg").read_text()
    assert "second tier in host memory (GiB)" in drawn
    assert "no second tier" in drawn


def test_a_call_sweeps_over_tiers_as_the_command_does() -> None:
    groups, trace = [spec_from_text("full:64"), spec_from_text("swa:64:128")], "tests/data/traces/ceilings_tier.jsonl"
    for pool in ({"vary": {}, "options": {"num_blocks": 40}}, {"vary": {"num_blocks": [40]}, "options": {}}):
        vary = {**pool["vary"], "offload": ["0", "100", "400"]}
        found = sweep(trace, vary, {**pool["options"], "groups": groups}, engine="numpy")
        assert found.points["offload"].tolist() == ["0", "100", "400"]
        assert found.lines["line"].tolist() == [""]


def test_each_sentence_of_a_sweep_is_a_command(tmp_path: pathlib.Path) -> None:
    met: set[str] = set()
    for seed in range(len(proofs.CACHES)):
        words = f"{written(seed, tmp_path)} {command_of(seed)}"
        met |= hold_sweep(words, "--num-blocks", ";", pools_of(words))
        if "vllm" in words and "lmcache" not in words:
            chunks = {f"{size:,} chunks in the second tier": str(size) for size in (30, 90, 400)}
            met |= hold_sweep(words, "--offload", ",", {"no second tier": "0", **chunks})
    assert met == {"highest", "infinite", "knee", "reached", "not reached", "no second tier"}


def pools_of(words: str) -> dict[str, str]:
    """Three sizes of the pools, in growing order, by the words that a sweep has for them."""
    (pools,) = re.findall(r"--num-blocks (\S+)", words)
    sizes = [[times * int(each) for each in pools.split(",")] for times in (1, 2, 5)]
    return {f"{sum(each):,} blocks": ",".join(map(str, each)) for each in sizes}


def hold_sweep(words: str, axis: str, between: str, sizes: dict[str, str]) -> set[str]:
    """Holds each sentence of a sweep to replays of its sizes; returns what they speak of."""
    words = re.sub(rf"{axis} \S+", "", words)
    shown = said(f"sweep {words} {axis} {between.join(sizes.values())} --jobs 1 --bounds --target 5 --target 99")
    rates = {name: replayed(f"{words} {axis} {size}")["totals"]["hit_rate"] for name, size in sizes.items()}
    told = {name: f"{rate:.2%}" for name, rate in rates.items()}
    met = {"highest"}
    ((best, name),) = re.findall(r"^highest: (\S+), with (.*?)(?:, [0-9,]+ requests refused)?$", shown, re.M)
    assert (told[name], rates[name]) == (best, max(rates.values())), (words, shown)
    for rate in re.findall(r"^no second tier: (\S+)$", shown, re.M):
        assert rate == told["no second tier"], (words, shown)
        met.add("no second tier")
    for rate in re.findall(r"^infinite: (\S+)$", shown, re.M):
        large = "60000,60000" if any("," in size for size in sizes.values()) else "60000"
        last = "" if axis == "--num-blocks" else f"{axis} {list(sizes.values())[-1]}"
        endless = re.sub(r"--num-blocks \S+", "", words)
        found = replayed(f"{endless} --num-blocks {large} {last}")["totals"]
        assert (f"{found['hit_rate']:.2%}", found["evictions"]) == (rate, 0), (words, shown)
        met.add("infinite")
    points = [(math.log(float(size.split(",")[0])), rates[name]) for name, size in sizes.items() if size != "0"]
    (left, low), (right, high) = points[0], points[-1]
    above = [rate - low - (high - low) * (size - left) / (right - left) for size, rate in points]
    bends = re.findall(r"^knee: (.*), (\S+)$", shown, re.M)
    assert bool(bends) == (max(above) > 1e-9), (words, shown)
    for name, rate in bends:
        assert rate == told[name], (words, shown)
        assert rates[name] == points[above.index(max(above))][1], (words, shown)
        met.add("knee")
    for target in (5, 99):
        reaching = [name for name, rate in rates.items() if rate >= target / 100]
        said_of = f"from {reaching[0]} on ({told[reaching[0]]})" if reaching else "not reached"
        assert f"\n{target}%: {said_of}\n" in shown, (words, shown)
        met.add("reached" if reaching else "not reached")
    return met


def test_each_sentence_of_a_comparison_is_two_replays(tmp_path: pathlib.Path) -> None:
    """Hits that differ, their causes and the requests that it names are held to both replays' requests."""
    met: set[str] = set()
    for seed in range(len(proofs.CACHES)):
        words = f"{written(seed, tmp_path)} {command_of(seed)}"
        pools = list(pools_of(words).values())
        pairs = [("--num-blocks", ";", pools[:2])]
        if "vllm" in words and "lmcache" not in words:
            pairs += [("--offload", ",", ["0", "300"]), ("--retention", ",", ["dense", "0"])]
        for option, between, values in pairs:
            plain = re.sub(rf"{option} \S+", "", words)
            met |= hold_comparison(plain, option, between, values)
    refusing = "tests/data/traces/ceilings_tier.jsonl --groups full:64 --engine numpy"
    met |= hold_comparison(refusing, "--num-blocks", ";", ["8", "40"])
    assert met == {"same", "more", "less", "request", "only"}


def hold_comparison(words: str, option: str, between: str, values: list[str]) -> set[str]:
    """Holds each sentence of a comparison to both replays; returns which kinds there were."""
    shown = said(f"compare {words} {option} {between.join(values)} --jobs 1")
    first, other = (replayed(f"{words} {option} {value}")["requests"] for value in values)
    causes = [name for name in CAUSES if name in first]
    more = [theirs - mine for mine, theirs in zip(first["hit"], other["hit"], strict=True)]
    met = set()

    def moved(chosen: list[int], sign: int) -> dict[str, int]:
        sums = {cause: sign * sum(other[cause][each] - first[cause][each] for each in chosen) for cause in causes}
        return {cause: tokens for cause, tokens in sums.items() if tokens}

    def told(text: str) -> dict[str, int]:
        found = [each.rpartition(" ") for each in re.split(r", (?=[a-z])", " ".join(text.split()))]
        return {cause: int(tokens.replace(",", "")) for cause, _, tokens in found}

    assert f"{option} {values[1]} against {option} {values[0]}:" in shown
    body = shown.partition(" against ")[2]
    sides = {
        "more": [at for at, each in enumerate(more) if each > 0],
        "less": [at for at, each in enumerate(more) if each < 0],
    }
    found = re.findall(r"^  ([0-9,]+) requests? hit ([0-9,]+) tokens (more|less): ((?:.|\n(?!  ))*)", body, re.M)
    assert {word for _, _, word, _ in found} == {word for word, there in sides.items() if there}, (words, shown)
    for requests, tokens, word, why in found:
        there = sides[word]
        assert int(requests.replace(",", "")) == len(there), (words, shown)
        assert int(tokens.replace(",", "")) == sum(abs(more[at]) for at in there), (words, shown)
        assert told(why) == moved(there, -1 if word == "more" else 1), (words, shown)
        met.add(word)
    assert ("every hit is the same" in body) == (not any(more)), (words, shown)
    met |= set() if any(more) else {"same"}
    for number, mine, theirs, prompt, why in re.findall(
        r"^  request (\d+): ([0-9,]+) -> ([0-9,]+) of ([0-9,]+); ((?:.|\n(?!  |$))*)", body, re.M
    ):
        at = int(number)
        hits = [int(each.replace(",", "")) for each in (mine, theirs, prompt)]
        assert hits == [first["hit"][at], other["hit"][at], first["prompt"][at]], (words, shown)
        assert told(why) == moved([at], 1), (words, shown)
        met.add("request")
    apart = sum((mine < 0) != (theirs < 0) for mine, theirs in zip(first["admitted"], other["admitted"], strict=True))
    only = re.findall(r"^  ([0-9,]+) requests?, admitted by one of the two only$", body, re.M)
    assert only == ([f"{apart:,}"] if apart else []), (words, shown)
    return met | ({"only"} if apart else set())


def swept(words: str) -> dict:
    return json.loads(said(f"sweep {words} --jobs 1 --json -"))


def said(words: str) -> str:
    done = CliRunner().invoke(cli, words, env={"COLUMNS": "1000"})
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.stdout


def test_the_command_of_a_model_with_a_tier_has_its_size(tmp_path: pathlib.Path) -> None:
    words = "--model tests/data/models/gemma3_text.json --memory 96MiB --max-model-len 256 --engine numpy"
    found = replayed(f"{written(4, tmp_path)} {words} --offload 512MiB")["resolved"]
    assert "--kv-offloading-size 0.5 --kv-offloading-backend native" in found
    assert "offloading" not in replayed(f"{written(4, tmp_path)} {words} --offload 0")["resolved"]
    done = CliRunner().invoke(cli, f"replay {written(4, tmp_path)} {words} --offload 1x")
    assert str(done.exception).startswith("offload = ")


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("offload", 400, True), ("offload", "400", True), ("offload", 0, True), ("offload", None, True),
        ("offload", True, False), ("offload", [400], False), ("offload", "many", False), ("offload", 4.5, False),
        ("offload_policy", "q", False), ("offload_policy", 3, False), ("offload_transfer_ms", "x", False),
        ("offload_defects", "no", False), ("offload_defects", False, True),
    ],
)  # fmt: skip
def test_an_option_of_a_dialect_is_what_its_command_takes(name: str, value: Any, taken: bool) -> None:
    """In Python as on the command line: numbers as well as their texts, and nothing else."""
    options = {"offload": 400, name: value}
    with contextlib.nullcontext() if taken else pytest.raises(HKVError, match=name):
        groups = [spec_from_text(text) for text in ("full:64", "swa:64:128")]
        replay_trace("tests/data/traces/ceilings_tier.jsonl", groups, 40, engine="numpy", dialect_options=options)
