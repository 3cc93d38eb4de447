"""A connector's function asked for the blocks of every case, in Python or C, and its answers held to the plan.

An answer has to have every byte of the block that carries data, none that is not of its page, and each of them once;
into how many ranges they are cut, and in which order, is the connector's own affair. A function that does not have a
form of memory says so, with NotImplementedError or a negative number, and is not asked for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from hkv.connectors.cases import MemoryCase, all_cases
from hkv.connectors.memory import Range, merged, without
from hkv.connectors.mistakes import named, told
from hkv.connectors.payload import disorder
from hkv.connectors.processes import Function, FunctionFailed, FunctionProcess
from hkv.errors import ConfigError
from hkv.foreign import own_warnings
from hkv.processes import PATIENCE, ProcessDied


def check_connector(function: Function | str, engines: Sequence[str] = (), seconds: float = PATIENCE) -> CheckReport:
    """Holds a connector's function to the plan.

    Args:
      function: the function, or its name: `MODULE:FUNCTION`, `FILE.py:FUNCTION` or `LIBRARY.so:FUNCTION`, which is
        called in a process of its own; where that dies or hangs, nothing more is asked.
      engines: those whose memory is asked for, of `vllm`, `rtp-llm` and `lmcache`; all where none is named.
      seconds: time that a function which is named may take for a block.

    Raises:
      HKVError: there is no such function or engine, or an answer is no ranges.
    """
    cases = all_cases(engines)
    blocks, supported, unsupported, wrong = 0, 0, [], []
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(FunctionProcess(function, seconds)) if isinstance(function, str) else function
        for case in cases:
            try:
                answers = list(_answers(asked, case))
            except NotImplementedError:
                unsupported.append(case.name)
                continue
            supported, blocks = supported + 1, blocks + len(answers)
            if finding := _finding(case, answers):
                wrong.append(finding)
            if isinstance(asked, FunctionProcess) and asked.over:
                break
    found = tuple(_likeliest(finding, wrong) for finding in wrong)
    return CheckReport(supported, blocks, tuple(unsupported), found, len(cases) - supported - len(unsupported))


def _likeliest(finding: Finding, wrong: Sequence[Finding]) -> Finding:
    """The finding with one mistake: of those that explain its case, the one that explains most others as well."""
    if not finding.mistakes:
        return finding
    best = max(finding.mistakes, key=lambda mistake: sum(mistake in each.mistakes for each in wrong))
    return dataclasses.replace(finding, mistake=best)


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first wrong answer about a case: what was given for a block of a layer, and the mistake, in words.

    `mistakes` are those that explain all wrong answers about the case.
    """

    case: MemoryCase
    layer: int
    block: int
    given: tuple[Range, ...] | str
    mistake: str
    mistakes: tuple[str, ...] = ()

    def describe(self) -> str:
        """The finding in a few lines, the mistake in the first."""
        memory, layer = self.case.memory, self.case.memory.layers[self.layer]
        lines = [f"wrong: {self.mistake}", f"  {self.case.name}: layer {layer.name}, block {self.block}"]
        given = self.given if isinstance(self.given, str) else _shown(self.given)
        lines += [f"  given     {given}", f"  expected  {_shown(self.case.data(self.layer, self.block))}"]
        for tensor in layer.tensors:
            rows = f", {tensor.rows_per_block} rows a block" if tensor.rows_per_block > 1 else ""
            shape = f"{tensor.axes} {list(tensor.shape)} {tensor.dtype}, strides {list(tensor.strides)} bytes"
            lines.append(f"  {tensor.name:<10}{shape}, from byte {tensor.offset:,} of buffer {tensor.buffer}{rows}")
        group = memory.groups[layer.group]
        of_group = f"{layer.group} of {len(memory.groups)}: blocks of {group.block_tokens} tokens"
        lines.append(f"  group     {of_group}, pages of {layer.page_bytes:,} bytes")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """Result of a check: cases and blocks that were asked for, names of those not supported, wrong ones.

    `left` counts the cases that were not asked, since the function's process had ended.
    """

    cases: int
    blocks: int
    unsupported: tuple[str, ...]
    wrong: tuple[Finding, ...]
    left: int = 0

    def describe(self) -> str:
        """The report in words, the mistake of the smallest wrong case in the first line."""
        head = f"{self.blocks} blocks of {self.cases} forms of memory asked for"
        if self.unsupported:
            head += f", {len(self.unsupported)} forms not supported"
        if self.left:
            head += f", {self.left} not asked any more"
        if not self.wrong:
            return f"right: {head}" if self.blocks else f"nothing asked: {head}"
        others = [finding.mistake for finding in self.wrong[1:]]
        more = f"\n{head}; wrong about {len(self.wrong)}"
        for mistake in dict.fromkeys(each for each in others if each != self.wrong[0].mistake):
            more += f"\n  {others.count(mistake)} more: {mistake}"
        return self.wrong[0].describe() + more

    def record(self) -> dict[str, Any]:
        """The report as plain values."""
        wrong = [
            {
                "case": each.case.name,
                "mistake": each.mistake,
                "memory": each.case.memory.record,
                "layer": each.layer,
                "block": each.block,
                "given": each.given if isinstance(each.given, str) else [list(one) for one in each.given],
                "data": [list(one) for one in each.case.data(each.layer, each.block)],
                "page": [list(one) for one in each.case.page(each.layer, each.block)],
            }
            for each in self.wrong
        ]
        counts = {"cases": self.cases, "blocks": self.blocks, "left": self.left}
        return {**counts, "unsupported": list(self.unsupported), "wrong": wrong}


Answer = tuple[int, int, "tuple[Range, ...] | str"]
"""A layer, a block, and the ranges for it, or what was raised in their place."""


def _answers(function: Function, case: MemoryCase) -> Iterator[Answer]:
    """Answers to all that is asked of a case, up to the one at which the function's process ended."""
    for layer, block in case.asks():
        try:
            with own_warnings():
                found = list(function(case.memory, layer, block))
        except (NotImplementedError, ConfigError):
            raise
        except FunctionFailed as error:
            yield layer, block, str(error)
        except ProcessDied as error:
            yield layer, block, str(error)
            return
        except Exception as error:
            yield layer, block, f"raised {type(error).__name__}: {error}"
        else:
            yield layer, block, tuple(_ranges(found))


def _ranges(found: Sequence[object]) -> Iterator[Range]:
    for each in found:
        try:
            buffer, first, size = (int(value) for value in each)  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            raise ConfigError("connector", each, "ranges, each a buffer, its first byte and its bytes") from None
        if size:
            yield Range(buffer, first, size)


def _finding(case: MemoryCase, answers: Sequence[Answer]) -> Finding | None:
    wrong = [answer for answer in answers if not _right(case, *answer)]
    ranges = [(layer, block, given) for layer, block, given in wrong if not isinstance(given, str)]
    if wrong:
        mistakes = named(case.memory, ranges) if len(ranges) == len(wrong) else ()
        return Finding(case, *wrong[0], _told(case, *wrong[0]), mistakes)
    right = ((layer, block, given) for layer, block, given in answers if not isinstance(given, str))
    found = disorder(case, right)
    return Finding(case, *found) if found else None


def _right(case: MemoryCase, layer: int, block: int, given: tuple[Range, ...] | str) -> bool:
    return not isinstance(given, str) and not any((_twice(given), *_off(case, layer, block, given)))


def _told(case: MemoryCase, layer: int, block: int, given: tuple[Range, ...] | str) -> str:
    """A wrong answer in words."""
    if isinstance(given, str):
        return f"the connector {given}"
    missing, extra = _off(case, layer, block, given)
    if not missing and not extra:
        first = _twice(given)[0]
        return f"bytes are given twice, from byte {first.first:,} of buffer {first.buffer} on"
    return told(case.memory, layer, missing, extra)


def _off(
    case: MemoryCase, layer: int, block: int, given: tuple[Range, ...]
) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Data that are missing, and bytes that are of no page."""
    return tuple(without(case.data(layer, block), given)), tuple(without(given, case.page(layer, block)))


def _twice(given: tuple[Range, ...]) -> list[Range]:
    """Ranges that begin inside another."""
    rising = merged(given)
    pairs = itertools.pairwise(rising)
    return [other for one, other in pairs if one.buffer == other.buffer and other.first < one.first + one.size]


def _shown(ranges: Sequence[Range], most: int = 4) -> str:
    several = len({each.buffer for each in ranges}) > 1
    text = [
        f"{each.first:,}..{each.first + each.size - 1:,}" + (f" of buffer {each.buffer}" if several else "")
        for each in ranges[:most]
    ]
    return ", ".join(text) + (f" and {len(ranges) - most} more" if len(ranges) > most else "") or "nothing"
