"""Draws the pictures of `docs/cache.md` from the arrays of a cache in which a few requests really ran.

Example:
  python docs/pictures/draw_state.py docs/pictures
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import jax
import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.operations import Batch, Code
from hkv.model.topology import Topology
from hkv.spec import FullAttention, SlidingWindow
from hkv.state.key_table import PARTS, SHARED, entry_of, first_block, was_evicted
from hkv.state.state import EVICTED, NEVER_SEEN, Buckets, Counter, Request, Row, State

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "hkv", "font.family": "DejaVu Sans", "font.size": 9}
)

GREY, FREE, USED, HOLE, NAMED, SHARE = "#eef0f2", "#cfe3ec", "#f4d6c8", "#ffffff", "#dfe8c9", "#f1e3a9"
BUCKETS = Buckets(blocks=16, requests=3, groups=4, row=8, chain=8, keys=12)
CONFIG = VllmConfig(
    topology=Topology.of_specs([FullAttention(block_size=4), SlidingWindow(block_size=4, window=5)]),
    num_blocks=16,
    hash_block_size=4,
    scheduler_block_size=4,
    max_model_len=32,
)


def story() -> State:
    """A: three blocks of a prompt, finished. C: the same prompt without a lookup, still there. B: hits what A left.

    Last, the window of C gives back what the query at 9 cannot read.
    """
    batch = Batch()
    for slot, keys, tokens in ((0, (0, 1, 2), 12), (2, (0, 1), 9)):
        batch.add(Code.REQUEST, slot, list(keys), tokens=tokens)
        batch.add(Code.ALLOCATE, slot, new=tokens, advance=1)
    batch.add(Code.FREE, 0).add(Code.DROP, 0)
    batch.add(Code.REQUEST, 1, [0, 3], tokens=9).add(Code.LOOKUP, 1)
    batch.add(Code.ALLOCATE, 1, new=-1, hit=-1, advance=1).add(Code.RETIRE, 2, tokens=9)
    state, results = cache.run(*cache.init(CONFIG, BUCKETS), batch.build(16, 16))
    cache.check(results)
    return jax.device_get(state)


def cells(axes: Axes, y: float, name: str, texts: Sequence[str], colours: Sequence[str], first: int = 0) -> None:
    """A row of boxes with their indices above, and the array's name before it."""
    axes.text(-0.3, y + 0.35, name, ha="right", va="center", fontweight="bold")
    for place, (text, colour) in enumerate(zip(texts, colours, strict=True)):
        axes.add_patch(Rectangle((place, y), 1, 0.7, facecolor=colour, edgecolor="#44505a", linewidth=0.7))
        axes.text(place + 0.5, y + 0.35, text, ha="center", va="center")
        axes.text(place + 0.5, y + 0.86, str(first + place), ha="center", va="center", fontsize=6.5, color="#77838d")


def canvas(width: float, height: float, columns: float, rows: float, left: float = 3.6) -> tuple[Figure, Axes]:
    """A figure without axes whose unit is one box."""
    figure, axes = pyplot.subplots(figsize=(width, height))
    axes.set_xlim(-left, columns)
    axes.set_ylim(-0.3, rows)
    axes.axis("off")
    return figure, axes


def draw_queue(state: State) -> Figure:
    """The ring of free blocks, and the whereabouts of every block."""
    head, tail = (int(state.counters[counter]) for counter in (Counter.HEAD, Counter.TAIL))
    ring = state.queue[:-1]
    shown = range(tail + 3)
    figure, axes = canvas(11, 3.0, len(shown) + 0.1, 4.4)
    inside = [head <= place < tail for place in shown]
    texts = [
        str(ring[place]) if within and ring[place] else ("hole" if within else "")
        for place, within in zip(shown, inside, strict=True)
    ]
    colours = [
        FREE if text not in ("", "hole") else HOLE if within else GREY
        for text, within in zip(texts, inside, strict=True)
    ]
    cells(axes, 2.4, "queue", texts, colours)
    for place, name in ((head, "head"), (tail, "tail")):
        axes.annotate(
            name,
            (place + (name == "head") * 0.5 + (name == "tail") * 0.5, 3.45),
            (place + 0.5, 4.1),
            ha="center",
            arrowprops={"arrowstyle": "->"},
        )
    words = state.blocks[: CONFIG.num_blocks]
    colours = [FREE if word > 0 else USED if word < 0 else GREY for word in words]
    cells(axes, 0.6, "blocks", [str(word) for word in words], colours)
    axes.text(
        0,
        0.05,
        "above 0: place in the ring plus 1 · below 0: minus the reference count · block 0 is the null block",
        va="center",
        fontsize=8,
    )
    return figure


def draw_keys(state: State) -> Figure:
    """Draws the table by key and group, the blocks' own words, and the rings of equal keys."""
    names = {NEVER_SEEN: "·", EVICTED: "evicted"}
    figure, axes = canvas(11.5, 4.6, 16.1, 7.9)
    for group in range(2):
        values = [EVICTED if was_evicted(value) else value for value in map(int, state.table[:4, group])]
        texts = [names.get(value) or f"block {first_block(value)}" + ("…" if value & 1 else "") for value in values]
        colours = [SHARE if value > 0 and value & 1 else NAMED if value > 0 else GREY for value in values]
        for place, (text, colour) in enumerate(zip(texts, colours, strict=True)):
            axes.add_patch(
                Rectangle((2.2 * place, 6.6 - group), 2.2, 0.7, facecolor=colour, edgecolor="#44505a", linewidth=0.7)
            )
            axes.text(2.2 * place + 1.1, 6.95 - group, text, ha="center", va="center")
        axes.text(-0.3, 6.95 - group, f"table, group {group}", ha="right", va="center", fontweight="bold")
    for place in range(4):
        axes.text(2.2 * place + 1.1, 7.5, f"key {place}", ha="center", fontsize=7.5, color="#77838d")
    words = [int(word) for word in state.keys[: CONFIG.num_blocks, 0]]
    entries = [int(entry_of(word)) for word in words]
    texts = [
        f"k{entry // BUCKETS.groups} g{entry % BUCKETS.groups}" if word else ""
        for word, entry in zip(words, entries, strict=True)
    ]
    colours = [SHARE if word & (SHARED | PARTS) else NAMED if word else GREY for word in words]
    cells(axes, 3.7, "keys", texts, colours)
    alone = [
        not word & SHARED or not state.table.reshape(-1)[entry] & 1 for word, entry in zip(words, entries, strict=True)
    ]
    for side, (y, name) in enumerate(((2.3, "links, next"), (1.0, "links, previous"))):
        texts = [
            "" if single else str(link)
            for single, link in zip(alone, state.links[: CONFIG.num_blocks, side], strict=True)
        ]
        cells(axes, y, name, texts, [GREY if single else SHARE for single in alone])
    axes.text(
        0,
        0.45,
        "yellow: dropping the key needs more than one write · green: plain · …: further blocks hang in the ring",
        va="center",
        fontsize=8,
    )
    return figure


def draw_rows(state: State) -> Figure:
    """The rows of the requests, and the lengths that say which part of them counts."""
    figure, axes = canvas(9, 3.9, 8.2, 7.4, left=5.6)
    y = 6.2
    for slot, name in ((1, "B"), (2, "C")):
        for group in range(2):
            at = 16 + 16 * group
            first, length = (int(state.requests[slot, at + field]) for field in (Row.FIRST, Row.LENGTH))
            row = state.rows[slot, group]
            texts = [
                str(block) if first <= place < length else "null" if place < first else ""
                for place, block in enumerate(row)
            ]
            colours = [
                USED if first <= place < length else HOLE if place < first else GREY for place in range(len(row))
            ]
            cells(axes, y, f"rows[{slot}, {group}] ({name}, {('full', 'window')[group]})", texts, colours)
            y -= 1.35
    computed = {name: int(state.requests[slot, Request.COMPUTED]) for slot, name in ((1, "B"), (2, "C"))}
    told = ", ".join(f"{name}: {count} tokens computed" for name, count in computed.items())
    axes.text(
        0, 1.6, f"{told} · grey entries hold whatever was there: a length says what counts", va="center", fontsize=8
    )
    axes.set_ylim(1.2, 7.4)
    return figure


PICTURES = {"queue": draw_queue, "key-table": draw_keys, "rows": draw_rows}


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes `state-NAME.svg` for each picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where to write the pictures")
    parser.add_argument("--png", action="store_true", help="as PNG instead of SVG")
    options = parser.parse_args(arguments)
    state = story()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw(state)
        suffix = "png" if options.png else "svg"
        metadata = {} if options.png else {"Date": None}
        figure.savefig(options.folder / f"state-{name}.{suffix}", bbox_inches="tight", metadata=metadata, dpi=110)
        pyplot.close(figure)
    print(f"{len(PICTURES)} pictures in {options.folder}, {np.count_nonzero(state.blocks < 0)} blocks in use")


if __name__ == "__main__":
    main()
