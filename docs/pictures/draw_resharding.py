"""Draws the picture of `docs/serving.md` from a real plan: who holds what on both sides, and who sends it.

Example:
  python docs/pictures/draw_resharding.py docs/pictures
"""

from __future__ import annotations

import argparse
import pathlib

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hkv.layout.block_layout import Layout
from hkv.mesh.parallel_shape import ParallelShape, Rank
from hkv.mesh.resharding import Move, Plan, Side, plan_resharding
from hkv.spec import FullAttention

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "hkv", "font.family": "DejaVu Sans", "font.size": 9}
)

COLOURS = ["#cfe3ec", "#f4d6c8", "#dfe8c9", "#f1e3a9"]
TOKENS = 12


def side(shape: ParallelShape, row: tuple[int, ...], order: str) -> Side:
    """One rank's share of a cache of 2 heads, in blocks of 4 tokens."""
    spec = FullAttention(block_size=4, num_kv_heads=shape.heads_per_rank, head_size=8)
    return Side(shape=shape, layout=Layout.of_spec(spec, order, num_blocks=8), row=row)


def example() -> Plan:
    """2 heads, 12 tokens: two tensor and two context ranks that take turns by 2, to four tensor ranks."""
    source = side(ParallelShape(heads=2, tensor=2, context=2, interleave=2), (3, 6), "LBNHC")
    return plan_resharding(source, side(ParallelShape(heads=2, tensor=4), (5, 2, 7), "LBHNC"), range(TOKENS))


def box(axes: Axes, token: int, y: float, text: str, colour: str, dashed: bool = False) -> None:
    """One token on one rank."""
    style = {"linestyle": "--", "linewidth": 1.1} if dashed else {"linewidth": 0.7}
    axes.add_patch(Rectangle((token, y), 0.94, 0.8, facecolor=colour, edgecolor="#44505a", **style))
    axes.text(token + 0.47, y + 0.4, text, ha="center", va="center", fontsize=8)


def label(axes: Axes, y: float, rank: Rank, chosen: Side) -> None:
    """The name of a rank, and its heads, before its row."""
    heads = ", ".join(map(str, chosen.shape.heads_of(rank.tensor)))
    name = f"tensor {rank.tensor}" + (f", context {rank.context}" if chosen.shape.context > 1 else "")
    axes.text(-0.2, y + 0.4, f"{name}: head {heads}", ha="right", va="center")


def states(move: Move) -> list[tuple[int, int, int]]:
    """(token, state on the sender, state on the receiver)."""
    return [
        (run.state + place, run.source + place, run.target + place) for run in move.runs for place in range(run.count)
    ]


def draw(plan: Plan) -> Figure:
    """Both sides, rank by rank and token by token."""
    figure, axes = pyplot.subplots(figsize=(10.5, 4.6))
    axes.set_xlim(-3.4, TOKENS)
    axes.set_ylim(-0.6, 11)
    axes.axis("off")
    ranks = {"source": plan.source.shape.ranks, "target": plan.target.shape.ranks}
    top = {"source": 9.0, "target": 3.0}
    for name, title in (("source", "prefill"), ("target", "decode")):
        axes.text(-3.3, top[name] + 1.25, title, fontweight="bold")
        for token in range(TOKENS):
            axes.text(token + 0.47, top[name] + 1.0, str(token), ha="center", fontsize=6.5, color="#77838d")
        for place, rank in enumerate(ranks[name]):
            label(axes, top[name] - place, rank, getattr(plan, name))
    for move in (*plan.sends, *plan.forwards):
        for token, read, written in states(move):
            sender = ranks["target" if move.forwarded else "source"].index(move.source)
            y = top["target"] - ranks["target"].index(move.target)
            if not move.forwarded:
                box(axes, token, top["source"] - sender, f"{move.source_block}:{read}", COLOURS[sender])
            text = f"{move.target_block}:{written}" + (f" ←{sender}" if move.forwarded else "")
            box(axes, token, y, text, "#ffffff" if move.forwarded else COLOURS[sender], move.forwarded)
    axes.text(
        -3.3,
        -0.5,
        "block:state of each token · a colour crosses from its rank · dashed: passed on by the decode rank named",
        va="center",
        fontsize=8,
    )
    return figure


def main() -> None:
    """Draws it into the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where the picture goes")
    figure = draw(example())
    target = parser.parse_args().folder / "resharding.svg"
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
