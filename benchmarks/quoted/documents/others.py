"""Claims of the other documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.quoted.claim import AnyClaim, Claim, Output
from benchmarks.quoted.sources import MUTATE

EXPLORE, SHARDING = "docs/explore.md", "docs/serving.md"


def _resharded(row: str, name: str, forwarded: bool = False) -> Claim:
    """Claim of a row of the table of reshardings about bytes; its times are not compared."""
    figures = ("sent", "forwarded") if forwarded else ("sent",)
    return Claim(
        SHARDING,
        f"| {row} | {{sent}} MiB | " + ("{forwarded} MiB |" if forwarded else "0 |"),
        ("resharding",),
        lambda made: {figure: made[f"{name}_{figure}"] for figure in figures},
    )


def _killed(made: Mapping[str, Any]) -> dict[str, Any]:
    summary = made["summary"]
    return {"killed": summary["killed"], "mutants": summary["mutants"]}


CLAIMS: tuple[AnyClaim, ...] = (
    Claim(
        EXPLORE,
        "The default space has {states} states and {transitions} transitions, of which {evict} % evict and {refuse} "
        "% are refused.",
        ("explore",),
        lambda made: made,
    ),
    Claim(
        EXPLORE,
        "the default space whole, {transitions} transitions, in",
        ("explore",),
        lambda made: {"transitions": made["transitions"]},
    ),
    Output(EXPLORE, "hkv explore --plant window-one-short", ("plant",)),
    Output(EXPLORE, MUTATE, ("mutate toy",)),
    Claim(
        "docs/tables/mutants.md",
        "{killed} of {mutants} mutants killed",
        ("mutants",),
        _killed,
    ),
    Claim(
        "docs/not-modelled.md",
        "meets it at its {example}th example",
        ("late copy",),
        lambda made: {"example": made["mutants"][0]["examples"]},
    ),
    Claim(
        "docs/not-modelled.md",
        "in at most {operations} operations. Three",
        ("defect logs",),
        lambda made: {"operations": made["operations"]},
    ),
    Claim(
        "docs/layouts.md",
        "`tests/data/layouts` holds {cases} answers of vLLM 0.33 ({equal} layouts equal, {both} refused by both, "
        "{alone} that HKV alone refuses because axes do not nest)",
        ("recorded layouts",),
        lambda made: {name: made[name] for name in ("cases", "equal", "both", "alone")},
    ),
    Claim(
        "docs/layouts.md",
        "the {formats} engine formats",
        ("declarations",),
        lambda made: {"formats": made["chunk_formats"]},
    ),
    Claim(
        "docs/versions.md",
        "kinds of layers and {rules} rules (`hkv/contract/dialect.py`)",
        ("declarations",),
        lambda made: {"rules": made["rules"]},
    ),
    Claim(
        "docs/layouts.md",
        "has the {fields} fields of RTP-LLM's `CacheGroupPolicy`",
        ("declarations",),
        lambda made: {"fields": made["policy_fields"]},
    ),
    _resharded("tensor 4 to tensor 2 | 8", "fewer"),
    _resharded("tensor 2 to tensor 4 | 8", "more"),
    _resharded("tensor 4 to tensor 4 | 1", "copies", forwarded=True),
    _resharded("tensor 4 to context 4 by 16 tokens | 8", "context"),
    _resharded("tensor 4 to tensor 2, context 2 by 1 token | 8", "both"),
)
