"""Draws the pictures of `docs/radix.md` from the reference's tree, in which a few requests really ran.

A node is a run of boxes, one a token: its letter, its full slot and its window slot, struck out where that is gone.
Nodes stand below one another as they branch, each as far to the right as its prefix is long.

Example:
  python docs/pictures/draw_radix.py docs/pictures
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hkv.dialects.sglang import log
from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
from hkv.dialects.sglang.log import AdmitOp, CheckpointOp, EvictOp, ExtendOp, FinishOp, State

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "hkv", "font.family": "DejaVu Sans", "font.size": 9}
)

GREY, TOKEN, FULL, WINDOW, EDGE = "#eef0f2", "#dfe8c9", "#cfe3ec", "#f4d6c8", "#44505a"
PAGES, SIZE_OF_WINDOW = 12, 2
Panel = tuple[str, State]


class Story:
    """A cache, and looks at it as requests come and go."""

    def __init__(self) -> None:
        groups = [
            {"kind": log.FULL_ATTENTION, "block_size": 1},
            {"kind": log.SLIDING_WINDOW, "block_size": 1, "window": SIZE_OF_WINDOW},
        ]
        given = log.Header(dialect=log.NAME, feature="pictures", num_blocks=[PAGES] * 2, groups=groups)
        self._engine = SGLangNumpyEngine(given)

    def after(self, *operations: log.Operation) -> State:
        """The state after some more operations."""
        for operation in operations:
            self._engine.perform(operation)
        return self._engine.perform(log.StateOp())


def admitted(id: str, letters: str) -> list[log.Operation]:
    """A request that comes with a prompt."""
    return [AdmitOp(id=id, tokens=list(letters.encode()))]


def request(id: str, letters: str, then: type[CheckpointOp | FinishOp]) -> list[log.Operation]:
    """A request that comes with a prompt, computes all of it, and enters it."""
    return [*admitted(id, letters), ExtendOp(id=id, length=len(letters)), then(id=id)]


def panels() -> dict[str, list[Panel]]:
    """The pictures: of each, its panels from the first to the last."""
    story = Story()
    a = request("A", "abcdef", FinishOp)
    b = [ExtendOp(id="B", length=4), CheckpointOp(id="B")]
    tree = [
        ("A: abcdef has finished", story.after(*a)),
        ("B: abxy is admitted: match_prefix splits abcd, inc_lock_ref holds ab", story.after(*admitted("B", "abxy"))),
        ("B is computed and entered: its lock has moved to xy", story.after(*b)),
    ]
    story = Story()
    story.after(*a)
    window = [
        ("evict of one window slot: abcd is a tombstone", story.after(EvictOp(tokens=[0, 1]))),
        ("C: abcdxy hits nothing, and enters up to d first", story.after(*request("C", "abcdxy", CheckpointOp))),
        ("and then the rest: abcdz would hit four now", story.after(CheckpointOp(id="C"))),
    ]
    eviction = [
        (
            "C has finished, and one full slot is wanted: the leaf ef leaves",
            story.after(FinishOp(id="C"), EvictOp(tokens=[1, 0])),
        ),
        (
            "E: mnopqr takes the slots free longest, and its window slides: full and window slots differ",
            story.after(*request("E", "mnopqr", CheckpointOp)),
        ),
        (
            "F: stu lacks three: the leaf xy leaves, then bcd, and with it the tombstone a",
            story.after(*request("F", "stu", CheckpointOp)),
        ),
    ]
    return {"tree": tree, "window": window, "eviction": eviction}


def draw(steps: Sequence[Panel]) -> Figure:
    """Panels below one another."""
    heights = [2.1 - _bottom(state) for _, state in steps]
    figure, axes = pyplot.subplots(len(steps), 1, figsize=(10, 0.25 * sum(heights)), height_ratios=heights)
    for panel, (title, state) in zip(axes, steps, strict=True):
        _draw_panel(panel, title, state)
    return figure


def _bottom(state: State) -> float:
    parents = [node.parent for node in state.nodes or ()]
    leaves = sum(number not in parents for number in range(len(parents)))
    return min(-3.2 * leaves + 0.6, -3.4)


def _draw_panel(axes: Axes, title: str, state: State) -> None:
    axes.set(xlim=(-1.6, 22), ylim=(_bottom(state), 2.1))
    axes.axis("off")
    axes.text(-1.5, 1.5, title, fontweight="bold")
    starts, rows, deepest = [0], [0], -1
    nodes = state.nodes or []
    for number, node in enumerate(nodes):
        start = starts[node.parent + 1] + (len(nodes[node.parent].tokens) + 0.25 if node.parent >= 0 else 0)
        first = all(other.parent != node.parent for other in nodes[:number])
        deepest = rows[node.parent + 1] if first and number else deepest + 1
        starts.append(start)
        rows.append(deepest)
        _draw_node(axes, start, -3.2 * deepest, node)
        if not first:
            above = -3.2 * rows[node.parent + 1]
            axes.plot([start - 0.13] * 2, [above, -3.2 * deepest], color=EDGE, linewidth=0.8)
    mapping = dict(state.window)
    pool = [("full", state.pools[0].free), ("window", state.pools[1].free)]
    for place, (name, free) in enumerate(pool):
        axes.text(12.2, 0.5 - 1.1 * place, f"free {name} slots: {' '.join(map(str, free)) or '-'}", fontsize=8)
    mapped = "  ".join(f"{full}→{other}" for full, other in mapping.items())
    axes.text(12.2, 0.5 - 2.2, f"full to window: {mapped}", fontsize=8)
    if state.recent:
        runs = ["".join(map(chr, nodes[number].tokens)) for number in state.recent[0]]
        axes.text(12.2, 0.5 - 3.3, f"window slots leave from the right: {'  '.join(runs)}", fontsize=8)


def _draw_node(axes: Axes, x: float, y: float, node: log.TreeNode) -> None:
    window = node.window or ["×"] * len(node.slots)
    for place, token in enumerate(node.tokens):
        rows = (
            (chr(token), TOKEN, True),
            (str(node.slots[place]), FULL, False),
            (str(window[place]), WINDOW if node.window else GREY, False),
        )
        for row, (text, colour, bold) in enumerate(rows):
            box = Rectangle((x + place, y - row * 0.75), 1, 0.75, facecolor=colour, edgecolor=EDGE, linewidth=0.7)
            axes.add_patch(box)
            weight = "bold" if bold else "normal"
            axes.text(x + place + 0.5, y - row * 0.75 + 0.36, text, ha="center", va="center", fontweight=weight)
    locks = [f"{name}{count}" for name, count in zip("FW", node.locks, strict=True) if count]
    told = " ".join([*locks, *(["\N{BLACK UP-POINTING TRIANGLE}"] if node.mark else [])])
    axes.text(x, y - 1.95, told, fontsize=7.5, va="center")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes `radix-NAME.svg` for each picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where to write the pictures")
    parser.add_argument("--png", action="store_true", help="as PNG instead of SVG")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, steps in panels().items():
        figure = draw(steps)
        suffix = "png" if options.png else "svg"
        metadata = {} if options.png else {"Date": None}
        figure.savefig(options.folder / f"radix-{name}.{suffix}", bbox_inches="tight", metadata=metadata, dpi=110)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
