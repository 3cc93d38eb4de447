"""Compares HKV's strides and views with an installed vLLM's: `python benchmarks/compare_layouts.py --cases 8000`.

Every case is a random layer in one of the six orders, legal or not. Where both lay it out, strides and every layer's
view must be equal. HKV refuses more than vLLM does: axes that do not nest, and kernel blocks that lose states.
"""

from __future__ import annotations

import collections
import math
from typing import Any

import click

from benchmarks.installed_layouts import InstalledLayouts, random_cases, spec_of
from hkv.errors import HKVError
from hkv.layout.block_layout import Layout

OUTCOMES = ("equal", "both refuse", "axes that do not nest", "a kernel block too small for its states", "DIFFERENT")
"""Outcomes of a case. The last but two are layouts that vLLM grants and HKV refuses."""


def our_answer(case: dict[str, Any]) -> dict[str, Any]:
    """Strides and views of a case, in bytes, as `InstalledLayouts.answer` has vLLM's."""
    places = {name: case[name] for name in ("num_blocks", "num_layers", "layer_stride", "block_stride", "offset")}
    try:
        spec = spec_of(case)
        strides = Layout.of_spec(spec, case["order"], **places).strides
        layout = Layout.of_spec(spec, case["order"], **places, kernel_block_size=case["kernel_block_size"])
        views = [layout.layer_view(layer) for layer in range(layout.num_layers)]
    except HKVError as error:
        return {"refused": str(error)}
    shown = [{"shape": list(v.shape), "strides": list(v.strides), "offset": v.offset} for v in views]
    return {"strides": list(strides), "views": shown}


def outcome(case: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Outcome of a case, one of `OUTCOMES`.

    Args:
      case: one of `random_cases`.
      theirs: answer of `InstalledLayouts.answer` to it.
    """
    ours = our_answer(case)
    if "refused" in ours and "refused" in theirs:
        return "both refuse"
    if "refused" in theirs:
        return "DIFFERENT"
    if "refused" not in ours:
        return "equal" if ours == theirs else "DIFFERENT"
    view = theirs["views"][0]
    if _loses_states(case, view):
        return "a kernel block too small for its states"
    both = _nests(_manager_shape(case), theirs["strides"]) and _nests(view["shape"], view["strides"])
    return "DIFFERENT" if both else "axes that do not nest"


def _nests(shape: list[int], strides: list[int]) -> bool:
    span = 1
    for stride, extent in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < span:
            return False
        span += (extent - 1) * stride
    return True


def _manager_shape(case: dict[str, Any]) -> list[int]:
    spec = spec_of(case)
    return [case["num_layers"], case["num_blocks"], spec.num_heads, spec.num_states, spec.content_bytes]


def _loses_states(case: dict[str, Any], view: dict[str, list[int]]) -> bool:
    spec = spec_of(case)
    return math.prod(view["shape"][:3]) < case["num_blocks"] * spec.num_heads * spec.num_states


@click.command()
@click.option("--cases", default=8_000, show_default=True, type=click.IntRange(min=1), help="Random layouts.")
@click.option("--seed", default=7, show_default=True, help="Of the cases.")
@click.pass_context
def main(context: click.Context, cases: int, seed: int) -> None:
    """Compares, and exits with 1 if any case differs."""
    installed = InstalledLayouts()
    counts: collections.Counter[str] = collections.Counter()
    for case in random_cases(cases, seed):
        theirs = installed.answer(case)
        counts[outcome(case, theirs)] += 1
        if counts["DIFFERENT"] == 1 and outcome(case, theirs) == "DIFFERENT":
            click.echo(f"{case}\n ours {our_answer(case)}\n vLLM {theirs}", err=True)
    for name in OUTCOMES:
        click.echo(f"{name:40} {counts[name]:,}")
    context.exit(1 if counts["DIFFERENT"] else 0)


if __name__ == "__main__":
    main()
