"""A connector's function asked for the blocks of every case, in Python or C, and its answers held to the plan.

An answer has to have every byte of the block that carries data, none that is not of its page, and each of them once;
into how many ranges they are cut, and in which order, is the connector's own affair. A function that does not have a
form of memory says so, with NotImplementedError or a negative number, and is not asked for it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hkv.connectors.cases import MemoryCase, all_cases
from hkv.connectors.memory import Memory, Range, merged, without
from hkv.connectors.mistakes import named, told
from hkv.errors import ConfigError
from hkv.foreign import is_library, library_function, python_function, split_name

Function = Callable[[Memory, int, int], Iterable[tuple[int, int, int]]]
"""Takes the memory and a layer and a block by index; returns buffer, first byte and number of bytes of each range."""

PURPOSE = "taking a memory, a layer and a block, and returning ranges of bytes"


def check_connector(function: Function | str, engines: Sequence[str] = ()) -> CheckReport:
    """Holds a connector's function to the plan.

    Args:
      function: the function, or its name: `MODULE:FUNCTION`, `FILE.py:FUNCTION` or `LIBRARY.so:FUNCTION`.
      engines: those whose memory is asked for, of `vllm`, `rtp-llm` and `lmcache`; all where none is named.

    Raises:
      HKVError: there is no such function or engine, or an answer is no ranges.
    """
    asked = function_of(function) if isinstance(function, str) else function
    blocks, supported, unsupported, wrong = 0, 0, [], []
    for case in all_cases(engines):
        try:
            answers = [(layer, block, _answer(asked, case.memory, layer, block)) for layer, block in case.asks()]
        except NotImplementedError:
            unsupported.append(case.name)
            continue
        supported, blocks = supported + 1, blocks + len(answers)
        if finding := _finding(case, answers):
            wrong.append(finding)
    return CheckReport(supported, blocks, tuple(unsupported), tuple(_likeliest(finding, wrong) for finding in wrong))


def _likeliest(finding: Finding, wrong: Sequence[Finding]) -> Finding:
    """The finding with one mistake: of those that explain its case, the one that explains most others as well."""
    if not finding.mistakes:
        return finding
    best = max(finding.mistakes, key=lambda mistake: sum(mistake in each.mistakes for each in wrong))
    return dataclasses.replace(finding, mistake=best)


def function_of(name: str) -> Function:
    """The function of a name.

    Raises:
      ConfigError: no such function.
    """
    if is_library(split_name("connector", name)[0]):
        return _of_library(name)
    return python_function("connector", name, PURPOSE)


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
    """Result of a check: cases and blocks that were asked for, names of those not supported, wrong ones."""

    cases: int
    blocks: int
    unsupported: tuple[str, ...]
    wrong: tuple[Finding, ...]

    def describe(self) -> str:
        """The report in words, the mistake of the smallest wrong case in the first line."""
        head = f"{self.blocks} blocks of {self.cases} forms of memory asked for"
        if self.unsupported:
            head += f", {len(self.unsupported)} forms not supported"
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
        counts = {"cases": self.cases, "blocks": self.blocks}
        return {**counts, "unsupported": list(self.unsupported), "wrong": wrong}


Answer = tuple[int, int, "tuple[Range, ...] | str"]
"""A layer, a block, and the ranges for it, or what was raised in their place."""


def _answer(function: Function, memory: Memory, layer: int, block: int) -> tuple[Range, ...] | str:
    try:
        found = list(function(memory, layer, block))
    except (NotImplementedError, ConfigError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    ranges = []
    for each in found:
        try:
            buffer, first, size = (int(value) for value in each)
        except (TypeError, ValueError):
            raise ConfigError("connector", each, "ranges, each a buffer, its first byte and its bytes") from None
        if size:
            ranges.append(Range(buffer, first, size))
    return tuple(ranges)


def _finding(case: MemoryCase, answers: Sequence[Answer]) -> Finding | None:
    wrong = [answer for answer in answers if not _right(case, *answer)]
    if not wrong:
        return None
    ranges = [(layer, block, given) for layer, block, given in wrong if not isinstance(given, str)]
    mistakes = named(case.memory, ranges) if len(ranges) == len(wrong) else ()
    return Finding(case, *wrong[0], _told(case, *wrong[0]), mistakes)


def _right(case: MemoryCase, layer: int, block: int, given: tuple[Range, ...] | str) -> bool:
    return not isinstance(given, str) and not any((_twice(given), *_off(case, layer, block, given)))


def _told(case: MemoryCase, layer: int, block: int, given: tuple[Range, ...] | str) -> str:
    """A wrong answer in words."""
    if isinstance(given, str):
        return f"the connector raised {given}"
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
    return [other for one, other in itertools.pairwise(rising) if _overlap(one, other)]


def _overlap(one: Range, other: Range) -> bool:
    return one.buffer == other.buffer and other.first < one.first + one.size


def _shown(ranges: Sequence[Range], most: int = 4) -> str:
    several = len({each.buffer for each in ranges}) > 1
    text = [
        f"{each.first:,}..{each.first + each.size - 1:,}" + (f" of buffer {each.buffer}" if several else "")
        for each in ranges[:most]
    ]
    return ", ".join(text) + (f" and {len(ranges) - most} more" if len(ranges) > most else "") or "nothing"


# Functions in a shared library, by the structures of `connector.h`.


class _CTensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("axes", ctypes.c_char_p),
        ("buffer", ctypes.c_int32),
        ("item_bytes", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("offset", ctypes.c_uint64),
        ("shape", ctypes.POINTER(ctypes.c_uint64)),
        ("strides", ctypes.POINTER(ctypes.c_uint64)),
        ("rows_per_block", ctypes.c_uint64),
        ("row_step", ctypes.c_uint64),
    )


class _CLayer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("group", ctypes.c_int32),
        ("num_tensors", ctypes.c_int32),
        ("page_bytes", ctypes.c_uint64),
        ("tensors", ctypes.POINTER(_CTensor)),
    )


class _CGroup(ctypes.Structure):
    _fields_ = (("block_tokens", ctypes.c_uint64), ("num_blocks", ctypes.c_uint64))


class _CMemory(ctypes.Structure):
    _fields_ = (
        ("engine", ctypes.c_char_p),
        ("num_buffers", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("num_layers", ctypes.c_int32),
        ("buffer_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("groups", ctypes.POINTER(_CGroup)),
        ("layers", ctypes.POINTER(_CLayer)),
    )


class _CRange(ctypes.Structure):
    _fields_ = (("buffer", ctypes.c_int32), ("first", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


MOST_RANGES = 1 << 16
"""Ranges of one block that a C function has room for."""


def _of_library(name: str) -> Function:
    function = library_function("connector", name)
    function.restype = ctypes.c_int64
    function.argtypes = (
        *(ctypes.POINTER(_CMemory), ctypes.c_int32, ctypes.c_uint64),
        *(ctypes.POINTER(_CRange), ctypes.c_int64),
    )
    room = (_CRange * MOST_RANGES)()
    made: dict[int, _CMemory] = {}

    def connector(memory: Memory, layer: int, block: int) -> list[tuple[int, int, int]]:
        if id(memory) not in made:
            made.clear()
            made[id(memory)] = _c_memory(memory)
        count = function(ctypes.byref(made[id(memory)]), layer, block, room, MOST_RANGES)
        if count < 0:
            raise NotImplementedError
        if count > MOST_RANGES:
            raise ConfigError("connector", count, f"at most {MOST_RANGES} ranges of a block")
        return [(each.buffer, each.first, each.bytes) for each in room[:count]]

    return connector


def _c_memory(memory: Memory) -> _CMemory:
    """The memory in C; ctypes keeps alive what its pointers lead to."""
    layers = []
    for layer in memory.layers:
        tensors = [
            _CTensor(
                *(tensor.name.encode(), tensor.dtype.encode(), tensor.axes.encode()),
                *(tensor.buffer, tensor.view.itemsize, len(tensor.shape), tensor.offset),
                *((ctypes.c_uint64 * len(values))(*values) for values in (tensor.shape, tensor.strides)),
                *(tensor.rows_per_block, tensor.row_step),
            )
            for tensor in layer.tensors
        ]
        array = (_CTensor * len(tensors))(*tensors)
        layers.append(_CLayer(layer.name.encode(), layer.group, len(tensors), layer.page_bytes, array))
    groups = [_CGroup(group.block_tokens, group.num_blocks) for group in memory.groups]
    return _CMemory(
        *(memory.engine.encode(), len(memory.buffers), len(groups), len(layers)),
        *((ctypes.c_uint64 * len(memory.buffers))(*memory.buffers), (_CGroup * len(groups))(*groups)),
        (_CLayer * len(layers))(*layers),
    )
