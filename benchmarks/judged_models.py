"""Counts configs by their judge and by what it says of HKV's reading: `python benchmarks/judged_models.py`.

`--differences` prints what the judges say otherwise, `--markdown` the section of docs/tables/models.md that
`model_tables.py` writes. `--shrink` takes out of `tests/data/model_classes/expected.json` what is no longer true of
HKV; it adds nothing.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import sys
from typing import Any

from benchmarks.judges.recorded import (
    EXPECTED,
    Judge,
    Judgement,
    Outcome,
    RecordedCase,
    found_today,
    judge,
    judge_caches,
    judge_of,
    recorded_cases,
)

SOURCES = {
    "library": "families of transformers, default values",
    "released": "released models",
    "published": "published files with unknown fields, or of quantized weights",
}
PLANNED = (Outcome.EQUAL, Outcome.RANKS, Outcome.DIFFERENT, Outcome.PLANNED_HERE)

HEAD = """## Judges

What HKV reads from a config is held against two judges that it has no part in. The first is the class that vLLM 0.33.0
serves the model with, built on the meta device as on a node of eight H100, at tensor parallel 1, 2 and 8 (published
files at 1): each caching
layer's own `get_kv_cache_spec`, then vLLM's groups, blocks, tokens and concurrency for 80 GiB. The second, for
configs of which vLLM builds no class, is the cache that `transformers` itself makes: heads, sizes and windows, layer by
layer. `python benchmarks/model_classes.py` and `model_caches.py` ask them; their answers are in
`tests/data/model_classes`, and a test holds HKV against them: equal, or refused by name, except for what
`expected.json` there lists, which may only become shorter. A config is counted as different if anything differs on any
number of ranks, in a layer or in the plan. Where vLLM builds a model on one rank and not on eight, it is mostly a
vision tower whose heads do not divide, which decides nothing that is cached.

What depends on the GPU is Hopper's: 16 tokens a block for latent attention (`FLASH_ATTN_MLA`), and FlashInfer's
prefill of gated delta nets, which keeps a checkpoint block.
"""


@functools.cache
def judgements() -> tuple[tuple[RecordedCase, Judgement], ...]:
    """Every config with its result: the worst over all its numbers of ranks."""
    order = (
        Outcome.DIFFERENT,
        Outcome.REFUSED_HERE,
        Outcome.RANKS,
        Outcome.PLANNED_HERE,
        Outcome.EQUAL,
        Outcome.REFUSED,
    )
    return tuple(
        (case, min((judge(case, ranks) for ranks in case.answers), key=lambda each: order.index(each.outcome)))
        for case in recorded_cases().values()
    )


def counts() -> dict[str, collections.Counter[Outcome]]:
    """Configs of each source by result."""
    found: dict[str, collections.Counter[Outcome]] = collections.defaultdict(collections.Counter)
    for case, judgement in judgements():
        found[case.name.partition("/")[0]][judgement.outcome] += 1
    return found


def share(outcomes: collections.Counter[Outcome]) -> float:
    """The part of what vLLM plans that HKV plans as well."""
    planned = sum(outcomes[each] for each in (Outcome.EQUAL, Outcome.RANKS, Outcome.DIFFERENT))
    return planned / (planned + outcomes[Outcome.REFUSED_HERE])


def section() -> str:
    """The section of docs/tables/models.md."""
    found = counts()
    lines = [HEAD, "| | " + " | ".join(SOURCES[source] for source in found) + " |", "|---|" + "--:|" * len(found)]
    lines.append("| configs | " + " | ".join(str(outcomes.total()) for outcomes in found.values()) + " |")
    for outcome in Outcome:
        lines.append(f"| {outcome.value} | " + " | ".join(str(each[outcome]) for each in found.values()) + " |")
    lines.append(
        "| of what vLLM plans, HKV plans | " + " | ".join(f"{share(each):.1%}" for each in found.values()) + " |"
    )
    return "\n".join([*lines, "", *by_judge(), *by_difference()])


def by_judge() -> list[str]:
    """Planned configs by kind of judge, as a table."""
    planned: dict[Judge, dict[str, list[RecordedCase]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for case, judgement in judgements():
        if judgement.outcome in PLANNED:
            planned[judge_of(case)][case.name.partition("/")[0]].append(case)
    lines = ["Every config that HKV plans, by its first judge:", "", "| judge | " + " | ".join(SOURCES.values()) + " |"]
    lines.append("|---|" + "--:|" * len(SOURCES))
    for kind in Judge:
        lines.append(f"| {kind.value} | " + " | ".join(str(len(planned[kind][source])) for source in SOURCES) + " |")
    by_cache = [case for cases in planned[Judge.TRANSFORMERS].values() for case in cases]
    other = [
        f"`{case.name}`: {found[0].ours} here (heads, sizes, window), {found[0].theirs} there"
        for case in by_cache
        if (found := judge_caches(case))
    ]
    lines += ["", f"Of the {len(by_cache)} held against transformers' caches, {len(by_cache) - len(other)} are equal."]
    lines += [f"- {each}" for each in other]
    return [*lines, ""]


def by_difference() -> list[str]:
    """Configs that HKV reads otherwise than vLLM, or refuses although vLLM plans them."""
    different, refused = [], []
    for case, judgement in judgements():
        if judgement.outcome is Outcome.DIFFERENT:
            different.append(f"| `{case.name}` | {judgement.differences[0]} |")
        if judgement.outcome is Outcome.REFUSED_HERE:
            refused.append(f"| `{case.name}` | {judgement.message.split(': expected')[0].replace('|', '/')} |")
    lines = []
    if different:
        lines += ["Different, each with its first difference:", "", "| config | value |", "|---|---|", *different, ""]
    if refused:
        lines += ["Refused, though vLLM plans them:", "", "| config | for |", "|---|---|", *refused, ""]
    return lines


def shrunk(known: dict[str, Any], today: dict[str, Any]) -> dict[str, Any]:
    """Entries that both have."""
    different = {
        name: kept
        for name, fields in known["different"].items()
        if (kept := [field for field in fields if field in today["different"].get(name, ())])
    }
    lists = {key: [name for name in known[key] if name in today[key]] for key in ("refused", "caches", "unjudged")}
    return {"different": different, **lists}


def print_differences() -> None:
    """Every difference and refusal, a line each."""
    for name, case in recorded_cases().items():
        for ranks in case.answers:
            judgement = judge(case, ranks)
            for each in judgement.differences or ((judgement.message,) if judgement.message else ()):
                print(f"{name} tp {ranks}: {judgement.outcome.value}: {each}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shrink", action="store_true", help="shorten expected.json")
    parser.add_argument("--differences", action="store_true", help="print every difference and refusal")
    parser.add_argument("--markdown", action="store_true", help="print the section of docs/tables/models.md")
    arguments = parser.parse_args()
    if arguments.shrink:
        known = json.loads(EXPECTED.read_text(encoding="utf-8"))
        EXPECTED.write_text(json.dumps(shrunk(known, found_today()), indent=1) + "\n", encoding="utf-8")
    elif arguments.differences:
        print_differences()
    elif arguments.markdown:
        print(section())
    else:
        for source, outcomes in counts().items():
            print(f"{source}: {outcomes.total()} configs, {share(outcomes):.1%} of what vLLM plans is planned")
            for outcome in Outcome:
                print(f"  {outcomes[outcome]:4} {outcome.value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
