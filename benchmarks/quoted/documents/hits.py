"""Claims of `docs/hits.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from benchmarks.quoted.claim import Claim, Table

DOCUMENT = "docs/hits.md"


def _examples(made: Mapping[str, Any]) -> list[str]:
    """The table of smallest examples; vLLM's column where it was asked."""
    asked = "vllm" in made["examples"][0]
    rows = ["| cause | example | iteration | definition |", "|---|---|---|---|"]
    if asked:
        rows = ["| cause | example | iteration | definition | vLLM 0.33.0 |", "|---|---|---|---|---|"]
    for row in made["examples"]:
        cause, _, how = row["cause"].partition(",")
        cells = [f"`{cause}`{how and ',' + how}", _written(row["example"]), row["iteration"], row["definition"]]
        rows.append("| " + " | ".join(map(str, [*cells, *([row["vllm"]] if asked else [])])) + " |")
    return rows


def _written(example: str) -> str:
    """An example as the document writes it: `2 tokens; full:1 EAGLE holds 1, 2`, groups as code."""
    request, _, groups = example.partition(": ")
    parts = [request]
    for part in groups.split("; "):
        match = re.fullmatch(r"([\w:]+)( \(EAGLE\))? holds \[(.*)\]", part)
        assert match, part
        parts.append(f"`{match[1]}`{' EAGLE' if match[2] else ''} holds {match[3] or 'nothing'}")
    return "; ".join(parts)


def _causes(made: Mapping[str, Any], part: str) -> list[str]:
    """Cases that differ by cause, most frequent first; several causes at once are one row."""
    found = made[part]
    rows = ["| cause | cases | share |", "|---|--:|--:|"]
    order = sorted(found["causes"].items(), key=lambda item: (-item[1], item[0]))
    for causes, count in order:
        more = " (more)" if causes in ("CHUNK_OFF_GRID", "DROP_NOT_REPEATED") else ""
        name = " with ".join(f"`{cause}`" for cause in causes.split(" + "))
        rows.append(f"| {name}{more} | {count:,} | {count / found['total']:.3%} |".replace("% |", " % |"))
    return rows


def _random(made: Mapping[str, Any]) -> dict[str, Any]:
    found = made["random"]
    share = {name: 100 * count / found["total"] for name, count in found["counts"].items()}
    return {"cases": found["total"], "less": share["less"], "more": share["more"], "none": share["no cause applies"]}


def _traffic(made: Mapping[str, Any]) -> dict[str, Any]:
    found, counts = made["traffic"], made["traffic"]["counts"]
    return {
        "lookups": found["total"],
        "less": counts["less"],
        "less_share": 100 * counts["less"] / found["total"],
        "more": counts["more"],
        "more_share": 100 * counts["more"] / found["total"],
        "hits": counts["hits"],
        "hits_share": 100 * counts["hits"] / found["total"],
    }


CLAIMS = (
    Claim(
        DOCUMENT,
        "**{causes} named causes** applies. {less} make it return less, {more} more.",
        ("causes",),
        lambda made: made,
    ),
    Claim(
        DOCUMENT,
        "All {caches} caches of one group (requests of 1 to 5 tokens) or two groups (1 to 3 tokens), blocks of 1 or "
        "2 tokens, windows to 4, chunks to 3, every EAGLE subset, every set of entries: {differ} differ",
        ("small hits",),
        lambda made: made["small"],
    ),
    Claim(
        DOCUMENT,
        "**Random sets.** {cases} caches of 1 to 5 groups, unequal blocks, any EAGLE subset, 1 to 4 ranks, "
        "look-ahead 0 to 2, any set of entries, even such as no traffic would leave: {less} % less, {more} % more, "
        "each for a named cause. For {none} % of them no cause applies",
        ("hits",),
        _random,
    ),
    Claim(
        DOCUMENT,
        "**Traffic.** {lookups} lookups in 2,000 random logs, small pools that evict: {less} of them find less "
        "({less_share} %), {more} more ({more_share} %), each for a named cause. {hits} lookups ({hits_share} %) "
        "hit.",
        ("hits",),
        _traffic,
    ),
    Claim(
        DOCUMENT,
        "Of {cases} random cached sets, those that differ:",
        ("hits",),
        lambda made: {"cases": made["random"]["total"]},
    ),
    Claim(
        DOCUMENT, "Of {lookups} lookups under traffic:", ("hits",), lambda made: {"lookups": made["traffic"]["total"]}
    ),
    Claim(
        DOCUMENT,
        "{same} of {cases} answers, failures included, are those of the reference's iteration",
        ("hits vllm",),
        lambda made: {"same": made["vllm"]["counts"]["same"], "cases": made["vllm"]["total"]},
    ),
    Table(DOCUMENT, "examples", ("small hits",), _examples, columns=4),
    Table(DOCUMENT, "examples", ("small hits vllm",), _examples),
    Table(DOCUMENT, "random", ("hits",), lambda made: _causes(made, "random")),
    Table(DOCUMENT, "traffic", ("hits",), lambda made: _causes(made, "traffic")),
)
