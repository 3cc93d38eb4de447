"""Judgement of a kernel: cases drawn and performed, failures explained, made smaller and told.

`check` draws until so many cases were asked, and goes on for a while after the first failure: a mistake that explains
several failures byte for byte names the kind, which one alone often cannot (where everything is two, all strides look
alike). The smallest case that still fails for the same reason is then reported, and what every failure had in common.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from hkv import files
from hkv.contract.traffic import RandomChoices
from hkv.errors import ConfigError, HKVError
from hkv.layout.views.numpy import numpy_dtype, view
from hkv.testing.kernels import definition, telling
from hkv.testing.kernels.call import Call
from hkv.testing.kernels.cases import FEATURES, Case, Supports, Unavailable, check_case, features_of, is_far
from hkv.testing.kernels.drawing import draw_case, size_of, smaller
from hkv.testing.kernels.targets import Target

FAILURES = 12
"""Failures after which no more cases are drawn."""

AFTER_FAILURE = 120
"""Cases that are still drawn after the first failure."""

NEAR = 100
"""Cases drawn first, without those that have more than 2^31 elements."""

WIDE = 20
"""Geometries of which one has a size that is none of the small ones."""

TRIES = 60
"""Cases drawn for each that is asked, before a kernel counts as supporting none."""

TOLERANCES = {"float32": 2e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""Absolute and relative tolerance of attention, by element type, of sums in float32 rounded once."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One failure: the call as it was before, what had to change and what did, or the error that was raised."""

    call: Call
    wanted: telling.Changes
    got: telling.Changes
    error: str = ""

    @functools.cached_property
    def kinds(self) -> list[str]:
        """Names of mistakes that explain all of it, most telling first."""
        return telling.kinds(self.call, self.wanted, self.got, self.error)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A kernel's failure, told.

    Attributes:
      kind: the kind of mistake.
      text: what happened, in lines; the first begins with the kind.
      case: the smallest case found.
      failed: number of cases that failed.
      asked: number of cases performed until then.
    """

    kind: str
    text: str
    case: Case
    failed: int
    asked: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Outcome of a check.

    Attributes:
      target: name of the kernel.
      operation: its operation.
      asked: cases performed.
      features: cases that had each feature, layout, content and type, by name.
      not_asked: cases drawn and left out, by the names of what is not supported.
      failure: the failure, or None.
    """

    target: str
    operation: str
    asked: int
    features: dict[str, int]
    not_asked: dict[str, int]
    failure: Failure | None


def perform(target: Target, case: Case) -> Finding | None:
    """Performs one case, and compares; None if everything is as it must be. Unavailable as `Target.run`."""
    call = target.call(case)
    error = ""
    try:
        target.run(call)
    except Unavailable:
        raise
    except (Exception, SystemExit) as raised:  # whatever a kernel raises is its failure, told with the case
        error = f"{type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}".rstrip(": ")
    wanted, got = definition.expected(call).changes(call.before), call.memory.changes(call.before)
    if case.operation == "attention" and not error:
        wanted, got = _close(call, wanted, got, target.supports.tolerance or TOLERANCES[case.dtype])
    if case.extremes:
        wanted, got = _any_nan(call, wanted, got)
    if not error and np.array_equal(wanted[0], got[0]) and np.array_equal(wanted[1], got[1]):
        return None
    return Finding(call, wanted, got, error)


def _any_nan(call: Call, wanted: telling.Changes, got: telling.Changes) -> tuple[telling.Changes, telling.Changes]:
    """The changes, without those where a NaN stands for another: of a NaN that is rounded no bits are promised."""
    dtype = numpy_dtype(call.case.dtype)
    addresses, right, wrong = telling.differing(call, wanted, got)
    both = addresses[np.isnan(right.view(dtype)) & np.isnan(wrong.view(dtype))]
    return _only(wanted, ~np.isin(wanted[0], both)), _only(got, ~np.isin(got[0], both))


def _close(
    call: Call, wanted: telling.Changes, got: telling.Changes, tolerance: float
) -> tuple[telling.Changes, telling.Changes]:
    """The changes, without those of the result if it is as close as rounding allows."""
    where = call.outputs["out"]
    found = view(call.memory.array, where).astype(np.float64)
    if not np.allclose(found, definition.attention(call), rtol=tolerance, atol=tolerance):
        return wanted, got
    outside = [(places < where.offset) | (places >= where.end) for places in (wanted[0], got[0])]
    return _only(wanted, outside[0]), _only(got, outside[1])


def _only(changes: telling.Changes, chosen: np.ndarray) -> telling.Changes:
    return changes[0][chosen], changes[1][chosen]


def check(
    target: Target,
    draws: int = 1000,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
    failing: Callable[[Failure], None] = lambda failure: None,
) -> Verdict:
    """Performs so many drawn cases, or as many as it takes to tell a failure.

    Args:
      target: the kernel.
      draws: cases that it supports.
      seed: of the draws; the same seed draws the same cases for the same support.
      progress: called after each case.
      failing: called with each failure as it is found, by what explains it alone.

    Raises:
      ConfigError: the kernel supports hardly any case.
    """
    features: collections.Counter[str] = collections.Counter()
    not_asked: collections.Counter[str] = collections.Counter()
    found: list[Finding] = []
    passed: list[Case] = []
    asked, last = 0, draws
    for case in cases_of(target, seed):
        missing, finding = target.supports.not_asked(case), None
        if not missing:
            try:
                finding = perform(target, case)
            except Unavailable as refusal:
                missing = (str(refusal),)
        if missing:
            not_asked.update(missing)
            if not_asked.total() > TRIES * (asked + 50):
                names = ", ".join(name for name, _ in not_asked.most_common(5))
                expected = f"a kernel that supports more of operation {case.operation} than {asked} cases; not {names}"
                raise ConfigError("TARGET", target.name, expected)
            continue
        asked += 1
        progress()
        features.update((*features_of(case), case.layout, case.content, case.dtype))
        if finding is None:
            passed.append(case)
        else:
            found.append(finding)
            failing(Failure(finding.kinds[0], telling_of(finding), case, len(found), asked))
            last = min(last, asked + AFTER_FAILURE) if len(found) == 1 else last
            if telling.hangs(finding.kinds[0]):
                break
        if asked >= last or len(found) >= FAILURES:
            break
    failure = _told(target, found, passed) if found else None
    return Verdict(target.name, target.supports.operation, asked, dict(features), dict(not_asked), failure)


def cases_of(target: Target, seed: int) -> Iterator[Case]:
    """Cases of a kernel's operation without end; some have more than it supports.

    None of the first has a pool of more than 2^31 elements, so that mistakes in any pool are told before those there.
    """
    supports, number = target.supports, 0
    while True:
        geometry = RandomChoices(seed * 1_000_003 + number // supports.reuse)
        wide = number // supports.reuse % WIDE == WIDE - 1
        case = draw_case(RandomChoices((seed + 1) * 2_000_003 + number), supports, geometry, wide)
        if number >= NEAR or not is_far(case):
            yield case
        number += 1


def repeat(target: Target, case: Case) -> Verdict:
    """Performs one case alone; ConfigError where the kernel does not support it."""
    try:
        finding = perform(target, case)
    except Unavailable as refusal:
        raise ConfigError("case", str(case), f"one that {target.name} supports, not {refusal}") from None
    failure = None
    if finding is not None:
        failure = Failure(finding.kinds[0], telling_of(finding), case, 1, 1)
    return Verdict(target.name, case.operation, 1, dict.fromkeys(features_of(case), 1), {}, failure)


def telling_of(finding: Finding) -> str:
    """A failure in lines, by what explains this one alone."""
    return telling.told(finding.kinds[0], *_of(finding))


def _of(finding: Finding) -> tuple[Any, ...]:
    return finding.call, finding.wanted, finding.got, finding.error


def _told(target: Target, found: list[Finding], passed: list[Case]) -> Failure:
    """The failure that several findings are of, by its smallest case."""
    ended = found[-1] if telling.hangs(found[-1].kinds[0]) else None
    found = [one for one in found if one is not ended] or found  # what failed before it says more
    kind = _kind(found)
    first = min((one for one in found if kind in one.kinds), key=lambda one: (len(one.kinds), size_of(one.call.case)))
    smallest = first if ended else shrink(target, first, kind)
    first, *lines = telling.told(kind, *_of(smallest)).split("\n")
    if not telling.hangs(kind) and (only := _only_with([one.call.case for one in found], passed)):
        lines.append(f"every failure has, and no success: {', '.join(only)}")
        if telling.is_error(kind) or kind == telling.UNEXPLAINED:
            first = first.replace(kind, f"{kind}, only with {', '.join(only)}", 1)
    lines.insert(0, first)
    asked = len(found) + len(passed)
    lines.append(f"{len(found)} of {asked} cases failed")
    if ended and ended is not first:
        lines.append(f"then, at {ended.call.case}, {ended.kinds[0]}")
    return Failure(kind, "\n".join(lines), smallest.call.case, len(found), asked)


def _kind(found: list[Finding]) -> str:
    """The mistake that explains most findings; of several, the first that the earliest one names.

    A kernel may have several defects: one that explains a third of the failures is reported. An error that
    is raised says less than bytes do: where some cases run to their end, these are explained. What is vague
    counts half.
    """
    votes: collections.Counter[str] = collections.Counter()
    for finding in found:
        votes.update(finding.kinds)
    order = list(dict.fromkeys(kind for finding in found for kind in finding.kinds))
    wrong = sum(not finding.error for finding in found)
    known = [kind for kind in order if kind != telling.UNEXPLAINED and 3 * votes[kind] >= wrong]
    known = [kind for kind in known if not telling.is_error(kind)] or known
    weight = {kind: votes[kind] * (1 if kind in telling.VAGUE else 2) for kind in order}
    return max(known or [telling.UNEXPLAINED], key=lambda kind: (weight[kind], -order.index(kind)))


def _only_with(failed: list[Case], passed: list[Case]) -> list[str]:
    """Features and sizes that all failures have, and no success."""

    def has(case: Case) -> set[str]:
        sizes = {
            "several heads": case.heads > 1,
            "several layers": case.layers > 1,
            "several slots": case.block_size > 1,
        }
        return {
            *features_of(case),
            case.layout,
            case.content,
            case.dtype,
            *(name for name, held in sizes.items() if held),
        }

    common = set.intersection(*(has(case) for case in failed))
    others = set().union(*(has(case) for case in passed))
    order = [*FEATURES, *sorted(common)]
    return [name for name in dict.fromkeys(order) if name in common and name not in others] if passed else []


def shrink(target: Target, finding: Finding, kind: str, budget: int = 150) -> Finding:
    """The smallest case that fails for the same reason and for no other, as far as so many attempts lead.

    Where everything is one, every mistake looks like every other: a case is not made smaller than tells them apart.
    """
    best, progress = finding, True
    while progress and budget > 0:
        progress = False
        for case in smaller(best.call.case):
            budget -= 1
            if budget < 0:
                break
            found = _still(target, case, kind)
            if found is not None and len(found.kinds) <= len(best.kinds):
                best, progress = found, True
                break
    return best


def _still(target: Target, case: Case, kind: str) -> Finding | None:
    try:
        if target.supports.not_asked(case) or not target.supports.lists_sizes_of(case):
            return None
        found = perform(target, case)
    except (HKVError, Unavailable, ValueError):
        return None
    return found if found is not None and kind in found.kinds else None


class Kept(msgspec.Struct, frozen=True):
    """A case as a file keeps it, with the kernel's name and what was said of the kernel."""

    target: str
    supports: dict[str, Any]
    case: Case


def case_bytes(target: Target, case: Case) -> bytes:
    """A file of a case, as JSON."""
    types = {field.name: field.default for field in dataclasses.fields(Supports)}
    said = {name: getattr(target.supports, name) for name in types}
    said = {name: value for name, value in said.items() if value != types[name]} | {"operation": case.operation}
    return msgspec.json.format(msgspec.json.encode(Kept(target.name, said, case)), indent=2) + b"\n"


def read_case(text: bytes, path: str) -> Kept:
    """The case in a file.

    Raises:
      FileError: it is no such file.
      ConfigError: it holds a case that no layout has.
    """
    kept: Kept = files.decode_json(text, path, None, "a case that hkv check-kernel saved", Kept)
    types = {field.name: field.default for field in dataclasses.fields(Supports)}
    said = {name: tuple(value) if types.get(name) == () else value for name, value in kept.supports.items()}
    if unknown := set(said) - set(types):
        raise ConfigError("supports", sorted(unknown), f"fields of {', '.join(types)}")
    check_case(kept.case)
    return msgspec.structs.replace(kept, supports=said)
