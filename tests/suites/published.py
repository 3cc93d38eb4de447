"""The published invariants of KV caches, `B-I1` to `B-I38`, and which check stands for each.

`docs/tables/invariants.md` is made of this; `python -m tests.suites.published docs/tables/invariants.md` writes it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from hkv.dialects.rtp_llm.invariants import RTP_INVARIANTS
from hkv.dialects.vllm.invariants import INVARIANTS
from hkv.oracle.log_file import write_atomically
from tests.suites import SUITES, CaseSuite

PUBLISHED: MappingProxyType[str, str] = MappingProxyType(
    {
        "B-I1": "Free and referenced blocks are all blocks; each free one is queued once; counters equal a recount.",
        "B-I2": "A block's references are the places that name it, and those who pin it.",
        "B-I3": "A block that may still be written has one owner; a shared one is the same prefix at the same place.",
        "B-I4": "The null block is never queued, counted, cached, copied, read or written.",
        "B-I5": "Keys lead to blocks and back; a block that is handed out anew has lost its keys.",
        "B-I6": "Equal keys mean equal tokens from the first on, and equal adapter, salt, images and layout.",
        "B-I7": "Every read returns what a cold run would have stored there.",
        "B-I8": "At a hit every group can resume.",
        "B-I9": "No longer hit exists, by trying every length.",
        "B-I10": "A hit comes with exactly the columns that it covers; a lookup changes nothing.",
        "B-I11": "Filling the cache lowers nobody's hit.",
        "B-I12": "A draft's drop is taken off once, where it belongs; slots for drafts are there.",
        "B-I13": "Who sends a prompt again resumes close to its end.",
        "B-I14": "A block is given back once nobody can read it any more, and not before.",
        "B-I15": "A state stands for exactly as many tokens as it is filed under, and is copied forward only.",
        "B-I16": "An index is tokens divided by this group's own block, and lies in the table.",
        "B-I17": "What a result depends on was written by the block's owner: freed bytes never matter.",
        "B-I18": "Two live values never share a byte; writer and reader agree where each lies.",
        "B-I19": "Addresses from the shape, from strides and from the descriptor agree.",
        "B-I20": "A token's slot is the same by the manager's table and by the kernels'.",
        "B-I21": "Pages of one pool are equal, payload fits its page, and no field is lost on the way.",
        "B-I22": "Each layer that owns a cache is in one group, the same on all ranks, padded no further than needed.",
        "B-I23": "What is planned fits the memory, and what is reported is what a simulation reaches.",
        "B-I24": "A grant does not fail, a refusal changes nothing, and who is admitted alone can finish.",
        "B-I25": "Each token of a group that is spread over ranks is on one of them.",
        "B-I26": "Each head is moved once; ranks that count as copies hold the same bytes.",
        "B-I27": "A transfer moves the same tokens of the same layers at both ends, all of them or none.",
        "B-I28": "What was found stays until it was used; pins balance.",
        "B-I29": "A failed load is taken back to a length at which all groups can resume.",
        "B-I30": "A block or chunk is filed under the hash that closes it, in its own group and layout.",
        "B-I31": "Only what is complete is published; a shared, partly filled block is copied before it is written.",
        "B-I32": "Whoever leaves, however, leaves the same: no row, no reference, nothing under its name.",
        "B-I33": "Eviction follows its order: never-cached first, then least recently used, tails before heads.",
        "B-I34": "Replaying events rebuilds the index.",
        "B-I35": "What belongs to a request follows it when its row moves.",
        "B-I36": "Products of sizes do not overflow.",
        "B-I37": "Copies are as wide as address, stride and length all allow.",
        "B-I38": "A block with a step or a copy outstanding is not handed out.",
    }
)
"""Statement of each invariant, in one sentence."""

ELSEWHERE: MappingProxyType[str, str] = MappingProxyType(
    {
        "B-I29": "no operation of the logs reports a load that failed, and no rule of the dialects takes one back; "
        "a load that lacks an object moves nothing (`launches of a transfer`)"
    }
)
"""Invariants that have no check here, and the reason."""


class Row(NamedTuple):
    """One check: its name, who asks it, what it stands for, its promise in a sentence, and the exceptions."""

    name: str
    where: str
    promises: tuple[str, ...]
    promise: str
    exceptions: str


def rows() -> list[Row]:
    """Every check, in order of the published invariants."""
    found = [_row(each, "vLLM's log") for each in INVARIANTS.values()]
    found += [_row(each, "RTP-LLM's log") for each in RTP_INVARIANTS.values()]
    for suite in SUITES.values():
        if isinstance(suite, CaseSuite):
            found += [_row(each, f"suite `{suite.name}`") for each in suite.checks]
    return found


def _row(check: Any, where: str) -> Row:
    """A check's row; its docstring says when it holds, and with what exceptions, after its first paragraph."""
    _, _, more = inspect.cleandoc(check.check.__doc__ or "").partition("\n\n")
    exceptions = " ".join(more.split()) if "xception" in more else ""
    return Row(check.name, where, check.promises, check.promise, exceptions)


def page() -> str:
    """`docs/tables/invariants.md`."""
    every = rows()
    lines = [*HEAD, "", "| | what always holds | checks |", "|---|---|---|"]
    for id, sentence in PUBLISHED.items():
        names = [f"`{row.name}`" for row in every if id in row.promises]
        lines.append(f"| {id} | {sentence} | {', '.join(names) or f'none: {ELSEWHERE[id]}'} |")
    lines += ["", "## The checks", "", "| check | asked of | stands for | promise |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {row.where} | {', '.join(row.promises)} | {row.promise} |" for row in every]
    lines += ["", "## Exceptions", "", *EXCEPTIONS, "", "| check | when it holds, and the exceptions |", "|---|---|"]
    lines += [f"| `{row.name}` | {row.exceptions} |" for row in every if row.exceptions]
    return "\n".join([*lines, ""])


HEAD = (
    "# Invariants",
    "",
    "What always holds in a hybrid KV cache, whichever engine it is in, and the check that says so. Each row of the",
    "first table names what published bugs broke; the second says what each check promises. Those of a log are asked",
    "after every operation of any engine that speaks it (`hkv.dialects.vllm.invariants.Watch`,",
    "`hkv.dialects.rtp_llm.invariants.RtpWatch`), those of a suite of random cases of this code. The last table",
    "has the exceptions; [mutants.md](mutants.md) shows which bug each of the checks catches.",
    "",
    "This page is written by `python -m tests.suites.published docs/tables/invariants.md`.",
)

EXCEPTIONS = (
    "Where a promise is not asked for, and why; a check that is not here holds always. Capital letters name causes in",
    "`hkv.dialects.vllm.traffic.hit_comparison` ([hits.md](../hits.md) explains them).",
)


def main(arguments: Sequence[str]) -> None:
    """Writes the page to a file."""
    write_atomically(arguments[0], page().encode())


if __name__ == "__main__":
    main(sys.argv[1:])
