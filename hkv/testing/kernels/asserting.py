"""Assertions for test suites: a kernel like the definition, or like another kernel; a tensor like its layout.

Shapes say little: two blocks and two heads look the same, and a tensor whose axes were exchanged may have the shape
that was expected. So a view is compared by where its elements lie, and the axes that were confused are named.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hkv.errors import LayoutError
from hkv.layout.block_layout import Layout
from hkv.layout.strided import StridedView
from hkv.testing.kernels import judge
from hkv.testing.kernels.cases import Case, Unavailable
from hkv.testing.kernels.placement import Placement, of_layout
from hkv.testing.kernels.targets import Target, arranged, target_of

AXES = {"B": "blocks", "H": "heads", "N": "slots", "D": "elements", "S": "slots of all blocks", "L": "layers"}
"""Axes by letter, in words."""


def assert_writes_like(
    reference: str | Callable[..., Any],
    kernel: str | Callable[..., Any],
    operation: str = "",
    *,
    draws: int = 200,
    seed: int = 0,
    case: Case | None = None,
    **supports: Any,
) -> judge.Verdict:
    """Raises AssertionError where a kernel leaves other bytes than it should, with the mistake in its first line.

    Args:
      reference: `"definition"`, or another kernel, whose bytes count.
      kernel: a function, `MODULE:FUNCTION` or `LIBRARY.so:SYMBOL`.
      operation: as `hkv check-kernel --operation`; empty for what the kernel declares.
      draws: cases that are performed.
      seed: of the draws.
      case: this case alone, as a strategy of `hkv.testing.strategies.kernel_cases` draws it.
      supports: fields of `Supports`, in place of those that the kernel declares.

    Returns:
      What was asked, and what was not.

    Raises:
      AssertionError: bytes differ.
      ConfigError: no such function, or one that supports none of the cases.
    """
    target = target_of(kernel, operation, **supports)
    if reference != "definition":
        return _compare(target_of(reference, operation, **supports), target, draws, seed, case)
    verdict = judge.check(target, draws, seed) if case is None else judge.repeat(target, case)
    if verdict.failure is not None:
        raise AssertionError(verdict.failure.text)
    return verdict


def _compare(one: Target, other: Target, draws: int, seed: int, only: Case | None) -> judge.Verdict:
    """Two kernels on the same cases; what neither supports is left out."""
    asked, not_asked = 0, {}
    cases = judge.cases_of(other, seed) if only is None else iter([only])
    for case in itertools.islice(cases, judge.TRIES * draws):
        missing = (*one.supports.not_asked(case), *other.supports.not_asked(case))
        calls = [target.call(case) for target in (one, other)]
        try:
            if missing:
                raise Unavailable(missing[0])
            for target, call in zip((one, other), calls, strict=True):
                target.run(call)
        except Unavailable as refusal:
            not_asked[str(refusal)] = not_asked.get(str(refusal), 0) + 1
            continue
        asked += 1
        wanted, got = (call.memory.changes(call.before) for call in calls)
        if not all(np.array_equal(left, right) for left, right in zip(wanted, got, strict=True)):
            raise AssertionError(judge.telling_of(judge.Finding(calls[1], wanted, got)))
        if asked == draws:
            break
    return judge.Verdict(other.name, other.supports.operation, asked, {}, not_asked, None)


def assert_viewed_as(
    tensor: Any, layout: Layout | Placement, part: str, layer: int = 0, axes: str = "BNHD", base: int | None = None
) -> None:
    """Raises AssertionError unless a tensor's shape and strides are those of a part of a layout, axis by axis.

    Args:
      tensor: a NumPy array, a torch tensor, or anything with `shape`, and `strides` in bytes or `stride()` in elements.
      layout: the layout that it is said to have.
      part: `key`, `value`, `latent`, ...
      layer: one of the layout's layers.
      axes: letters of the tensor's axes in order, as `Supports.axes`.
      base: address of the pool's first byte, to compare where the tensor begins; None to leave that out.

    Raises:
      AssertionError: another shape, strides or start; its first line names the axes that are confused.
      LayoutError: the layout has no such part, or cannot be seen so.
    """
    placement = of_layout(layout) if isinstance(layout, Layout) else layout
    placement.part(part)
    try:
        wanted = arranged(placement.rows_view(part, layer), axes)
    except Unavailable as refusal:
        raise LayoutError("axes", axes, f"axes that {placement.family} can be seen in, not {refusal}") from None
    shape, strides, start = _seen(tensor, wanted)
    said = _view_mistake(shape, strides, wanted, axes)
    if said is None and base is not None and start is not None and start - base != wanted.offset:
        said = f"it begins at byte {start - base} of the pool, not {wanted.offset}"
    if said is not None:
        raise AssertionError(
            f"the tensor is not the {part} of layer {layer} of {placement.family} as {axes}: {said}\n"
            f"shape {list(shape)}, expected {list(wanted.shape)}\n"
            f"strides {list(strides)} bytes, expected {list(wanted.strides)}"
        )


def _seen(tensor: Any, wanted: StridedView) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
    """Shape, strides in bytes and address of a tensor."""
    if hasattr(tensor, "data_ptr"):
        item = tensor.element_size()
        return tuple(tensor.shape), tuple(stride * item for stride in tensor.stride()), tensor.data_ptr()
    if not hasattr(tensor, "strides"):
        raise LayoutError("tensor", type(tensor).__name__, f"an array with strides, of shape {wanted.shape}")
    interface = getattr(tensor, "__array_interface__", None)
    return tuple(tensor.shape), tuple(tensor.strides), interface["data"][0] if interface else None


def _view_mistake(shape: Sequence[int], strides: Sequence[int], wanted: StridedView, axes: str) -> str | None:
    """The difference in words; axes of one element may have any stride."""
    names = [AXES[letter] for letter in axes]
    if len(shape) != len(axes):
        return f"it has {len(shape)} axes, not {len(axes)} ({', '.join(names)})"
    right = list(zip(wanted.shape, wanted.strides, strict=True))
    found = list(zip(shape, strides, strict=True))

    def agree(order: Sequence[int]) -> bool:
        pairs = zip(found, (right[axis] for axis in order), strict=True)
        return all(one[0] == other[0] and (one[0] == 1 or one[1] == other[1]) for one, other in pairs)

    if agree(range(len(axes))):
        return None
    for first, second in itertools.combinations(range(len(axes)), 2):
        order = list(range(len(axes)))
        order[first], order[second] = second, first
        if agree(order):
            return f"axes {first} and {second} ({names[first]} and {names[second]}) are swapped"
        if tuple(shape) == wanted.shape and [strides[i] for i in order] == list(wanted.strides):
            return f"strides of axes {first} and {second} ({names[first]} and {names[second]}) are swapped"
    wrong = [axis for axis in range(len(axes)) if found[axis][0] != right[axis][0]]
    if wrong:
        return f"axis {wrong[0]} ({names[wrong[0]]}) has {shape[wrong[0]]}, not {wanted.shape[wrong[0]]}"
    wrong = [axis for axis in range(len(axes)) if shape[axis] > 1 and strides[axis] != wanted.strides[axis]]
    axis = wrong[0]
    return f"neighbours along axis {axis} ({names[axis]}) are {strides[axis]} bytes apart, not {wanted.strides[axis]}"
