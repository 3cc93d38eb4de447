"""Claims of `docs/evidence.md`, and of other documents about times: ratios are compared with the published spread.

A time by itself belongs to a machine: it may be four times shorter or longer elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.quoted.claim import Claim, Spread

DOCUMENT = "docs/evidence.md"
ELSEWHERE = 4.0
"""Factor by which a time may be longer or shorter on another machine."""

Made = Mapping[str, Any]


def _time(name: str) -> Spread:
    return Spread(name, name, ELSEWHERE)


def _beside(mode: str, jax: str) -> Claim:
    """A row of the table next to vLLM: both ratios."""
    times = "{hkv_least} ({hkv_median}) | {vllm_least} ({vllm_median})"
    sentence = f"| {mode} | {jax} | {times} | {{least}} ({{median}}) |"
    return Claim(
        DOCUMENT,
        sentence,
        (f"speed {mode}",),
        lambda made: {
            "ratio_least": made["ratio"]["least"],
            "ratio_median": made["ratio"]["median"],
            "hkv": made["hkv_ns"]["least"],
            "hkv_middle": made["hkv_ns"]["median"],
            "vllm": made["vllm_ns"]["least"],
            "vllm_middle": made["vllm_ns"]["median"],
        },
        {
            "ratio_least": Spread("least", "least"),
            "ratio_median": Spread("median", "median"),
            "hkv": _time("hkv_least"),
            "hkv_middle": _time("hkv_median"),
            "vllm": _time("vllm_least"),
            "vllm_middle": _time("vllm_median"),
        },
    )


def _forms(made: Made, *names: str) -> dict[str, Any]:
    """Block operations a second, and ns each, of some forms."""
    found = {}
    for name in names:
        dialect, form = name.split("_")
        (each,) = (
            value for key, value in made["forms"].items() if key.startswith(dialect) and key.lower().endswith(form)
        )
        found[f"{name}_rate"] = each["block_operations_per_second"]
        found[f"{name}_ns"] = each["ns_per_block_operation"]
    return found


def _dialects(columns: str, names: tuple[str, ...], *sources: str) -> Claim:
    """A table of dialects, with its head."""
    rows = {"plain": "`full:64`", "states": "`full:64,mamba:64`"}
    lines = [f"| groups | {columns} |", "|" + "---|" * (1 + len(names))]
    for row, text in rows.items():
        cells = " | ".join(f"{{{row}_{name}_rate}} ({{{row}_{name}_ns}})" for name in names)
        lines.append(f"| {text} | {cells} |")

    def figures(plain: Made, states: Made) -> dict[str, Any]:
        found = {"plain": _forms(plain, *names), "states": _forms(states, *names)}
        return {f"made_{row}_{name}": value for row, each in found.items() for name, value in each.items()}

    ends = [f"{row}_{name}_{what}" for row in rows for name in names for what in ("rate", "ns")]
    return Claim(DOCUMENT, "\n".join(lines), sources, figures, {f"made_{end}": _time(end) for end in ends})


def _scaling(part: str, blocks: int, tokens: int) -> Claim:
    """A row of the table of scaling."""

    def figures(made: Made) -> dict[str, Any]:
        (point,) = (each for each in made[part] if (each["num_blocks"], each["tokens"]) == (blocks, tokens))
        return {"hkv": point["hkv_ns"], "reading": point["gather_ns"]}

    sentence = f"| {blocks:,} | {tokens:,} | {{ns}} | {{gather}} |"
    return Claim(DOCUMENT, sentence, ("speed scaling",), figures, {"hkv": _time("ns"), "reading": _time("gather")})


def _times(document: str, sentence: str, source: str, figures: Mapping[str, str]) -> Claim:
    """A sentence of times: by name in the sentence the name that the source gives."""
    return Claim(
        document,
        sentence,
        (source,),
        lambda made: {f"made_{name}": made[key] for name, key in figures.items()},
        {f"made_{name}": _time(name) for name in figures},
    )


def _compiled(row: str, name: str) -> Claim:
    """A row of the table of compilations."""
    figures = {part: f"{name}_{part}" for part in ("trace", "compile", "least")}
    return _times(DOCUMENT, f"| {row} | {{trace}} | {{compile}} ({{least}}) |", "speed compilation", figures)


def _moved(row: str, name: str) -> Claim:
    """The times of a row of the table of reshardings."""
    figures = {way: f"{name}_{way}" for way in ("plan", "arrays")}
    return _times("docs/serving.md", f"| {row} | {{plan}} | {{arrays}} |", "speed resharding", figures)


FOUR = ("vllm_numpy", "rtp_numpy", "vllm_jax", "rtp_jax")
TWO = ("vllm_jax", "rtp_jax")

CLAIMS = (
    *(_beside(mode, jax) for mode in ("prompts", "schedule", "stress") for jax in ("0.10.2", "0.11.2")),
    Claim(
        DOCUMENT,
        "The whole trace of {requests} requests was decided by both as well: {hits} hit tokens",
        ("trace vllm",),
        lambda made: {"requests": made["requests"], "hits": made["hit_tokens"]},
    ),
    Claim(
        DOCUMENT,
        "The whole trace, {requests} requests and {millions} million block operations in {steps} steps",
        ("trace jax", "trace vllm"),
        lambda replay, beside: {
            "requests": replay["totals"]["requests"],
            "millions": beside["block_operations"] / 1e6,
            "steps": replay["totals"]["steps"],
        },
    ),
    Claim(
        DOCUMENT,
        "{best} ns a block operation in the best of 18 runs, {least} to {most} in the median ones",
        ("speed whole trace",),
        lambda made: {"made_best": made["hkv_ns"]["least"], "made_median": made["hkv_ns"]["median"]},
        {"made_best": _time("best"), "made_median": Spread("least", "most", ELSEWHERE)},
    ),
    _dialects(
        "vLLM, NumPy | RTP-LLM, NumPy | vLLM, JAX | RTP-LLM, JAX", FOUR, "speed dialects", "speed dialects states"
    ),
    _dialects("vLLM, JAX | RTP-LLM, JAX", TWO, "speed dialects whole", "speed dialects whole states"),
    *(_scaling("pool", size, 2_048 if size == 1_000 else 4_096) for size in (1_000, 3_000, 10_000, 30_000)),
    *(_scaling("pool", size, 4_096) for size in (300_000, 1_000_000)),
    *(_scaling("length", 100_000, tokens) for tokens in (256, 1_024, 16_384, 65_536)),
    Claim(
        "docs/cache.md",
        "gave {many_least} to {many_most} and {one_least} to {one_most}.",
        ("speed steps",),
        lambda made: {"many": made["many"], "one": made["one"]},
        {"many": Spread("many_least", "many_most"), "one": Spread("one_least", "one_most")},
    ),
    _times("docs/cache.md", "64 steps a dispatch | {ms} |", "speed steps", {"ms": "many_ms"}),
    _times("docs/cache.md", "statuses read each time | {ms} |", "speed steps", {"ms": "one_ms"}),
    _times("docs/cache.md", "hashing and manager | {ms} |", "speed steps", {"ms": "vllm_ms"}),
    _compiled("`hkv.dialects.vllm.machine.run`, every operation", "run"),
    _compiled("the same, reporting block ids and events", "reporting"),
    _compiled("the schedule of `hkv replay`", "schedule"),
    _moved("tensor 4 to tensor 2 | 8 | 32 MiB | 0", "fewer"),
    _moved("tensor 2 to tensor 4 | 8 | 32 MiB | 0", "more"),
    _moved("tensor 4 to tensor 4 | 1 | 4 MiB | 12 MiB", "copies"),
    _moved("tensor 4 to context 4 by 16 tokens | 8 | 32 MiB | 0", "context"),
    _moved("tensor 4 to tensor 2, context 2 by 1 token | 8 | 32 MiB | 0", "both"),
    _times(
        "docs/explore.md",
        "That took {seconds} s on two cores",
        "speed explore",
        {"seconds": "seconds"},
    ),
)
