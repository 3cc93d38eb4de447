"""Claims of `docs/tables/sweep.md`: every row of its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.quoted.claim import AnyClaim, Claim

DOCUMENT = "docs/tables/sweep.md"

MODELS = ("gemma-3-27b", "gemma-4-26b-a4b", "gpt-oss-120b", "mimo-v2-flash", "llama-4-scout", "qwen3-next-80b-a3b")
RTP_MODELS = ("qwen3-next-80b-a3b", "deepseek-v4-flash")

SIZES = "{small} % | {middle} % | {large} %"


def _rates(line: Mapping[str, Any]) -> dict[str, float]:
    rates = [100 * row["hit_rate"] for row in line["points"]]
    return {
        **dict(zip(("small", "middle", "large"), rates, strict=True)),
        "infinite": 100 * line["infinite"]["hit_rate"],
    }


def _bounds(line: Mapping[str, Any]) -> dict[str, float]:
    bounds = [100 * row["optimal_tokens"] / row["prompt_tokens"] for row in line["points"]]
    return dict(zip(("small", "middle", "large"), bounds, strict=True))


def _rows(model: str, source: str, rules: tuple[str, ...], pools: str) -> tuple[AnyClaim, ...]:
    return (
        *(
            Claim(
                DOCUMENT,
                f"| {model} | {name} | {SIZES} | {{infinite}} %",
                (source,),
                lambda made, place=place: _rates(made["lines"][place]),
            )
            for place, name in enumerate(rules)
        ),
        Claim(
            DOCUMENT, f"| {model} | at most, in {pools} | {SIZES} |", (source,), lambda made: _bounds(made["lines"][0])
        ),
    )


def _shares(made: Mapping[str, Any]) -> dict[str, float]:
    """Percentages of the prompt tokens by cause, those beyond any cache's reach together."""
    totals, tokens = made["totals"], made["missed"]["tokens"]
    shares = {name: 100 * tokens[name] / totals["prompt_tokens"] for name in tokens}
    evicted, kept = shares.pop("evicted"), shares.pop("not retained")
    return {"hit": 100 * totals["hit_rate"], "evicted": evicted, "kept": kept, "rest": sum(shares.values())}


CLAIMS: tuple[AnyClaim, ...] = (
    *(
        claim
        for model in MODELS
        for claim in _rows(model, f"sweep {model}", ("vLLM, retention 0", "vLLM, dense"), "vLLM's pool")
    ),
    *(
        Claim(
            DOCUMENT,
            f"| {model} | {{hit}} % | {{evicted}} % | {{kept}} % | {{rest}} % |",
            (f"misses {model}",),
            _shares,
        )
        for model in MODELS
    ),
    *(claim for model in RTP_MODELS for claim in _rows(model, f"sweep {model} rtp", ("RTP-LLM",), "RTP-LLM's pools")),
)
