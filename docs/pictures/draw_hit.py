"""Draws the picture of README: one prompt, three groups, and the length from which all of them can resume.

The block ids are those of a cache in which the requests really ran; README's Python is the same example.

Example:
  python docs/pictures/draw_hit.py docs/pictures
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

import hkv

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "hkv", "font.family": "DejaVu Sans", "font.size": 10}
)

SPECS = (hkv.FullAttention(block_size=16), hkv.SlidingWindow(block_size=16, window=32), hkv.Mamba(block_size=16))
NAMES = ("full attention", "window of 32", "Mamba state")
BLOCK, COMMON, COLUMNS = 16, 70, 7
CACHED, HIT, NEW, EDGE, QUIET = "#dfe6ea", "#9ccfb4", "#f4d6c8", "#44505a", "#77838d"


def ran() -> tuple[np.ndarray, int, list[int]]:
    """Block tables of a request and of one that shares 70 tokens with it, the hit, and each group's hit alone."""
    config = hkv.cache_config(hkv.Topology.of_specs(SPECS), num_blocks=64, max_model_len=256)
    cache = hkv.init(config, rows=2, row_blocks=16)
    for start, end in ((0, 48), (48, 96)):
        cache, _ = hkv.allocate(cache, 0, jnp.arange(start, end))
    prompt = jnp.arange(100).at[COMMON:].set(7)
    found = hkv.longest_hit(cache, prompt)
    before = np.asarray(cache.tables)
    cache, _ = hkv.allocate(cache, 1, prompt)
    tables = np.stack([before[0], np.asarray(cache.tables)[1]])
    return tables, int(found.length), np.asarray(found.alone).tolist()


def draw_row(axes: Axes, y: float, ids: Sequence[int], shared: Sequence[int]) -> None:
    """One request's blocks of one group; a null block is dashed, a block of both requests green."""
    for column, block in enumerate(ids):
        if block:
            colour = HIT if block in shared else NEW if shared else CACHED
            axes.add_patch(Rectangle((column, y), 1, 0.62, facecolor=colour, edgecolor=EDGE, linewidth=0.8))
            axes.text(column + 0.5, y + 0.3, str(block), ha="center", va="center")
        else:
            outline = Rectangle((column, y), 1, 0.62, facecolor="white", edgecolor=QUIET, linewidth=0.6, linestyle=":")
            axes.add_patch(outline)


def draw(path: pathlib.Path) -> None:
    """Writes the picture."""
    tables, hit, alone = ran()
    figure, axes = pyplot.subplots(figsize=(9.6, 4.4))
    axes.set_xlim(-3.9, COLUMNS + 2.6)
    axes.set_ylim(-0.75, 6.6)
    axes.axis("off")
    for column in range(COLUMNS + 1):
        axes.text(column, 5.55, str(BLOCK * column), ha="center", fontsize=8, color=QUIET)
    axes.text(-0.25, 5.55, "token", ha="right", fontsize=8, color=QUIET)
    axes.text(COLUMNS + 0.3, 5.55, "resumes alone at", fontsize=8.5, color=QUIET)
    for group, name in enumerate(NAMES):
        y = 4.7 - 1.85 * group
        first, second = tables[0, group, :6].tolist(), tables[1, group, :COLUMNS].tolist()
        shared = [block for block in second if block and block in first]
        axes.text(-3.9, y - 0.05, name, va="center", fontweight="bold")
        axes.text(-0.15, y + 0.3, "cached", ha="right", va="center", fontsize=8.5)
        axes.text(-0.15, y - 0.4, "new request", ha="right", va="center", fontsize=8.5)
        draw_row(axes, y, first, ())
        draw_row(axes, y - 0.7, second, shared)
        axes.text(COLUMNS + 0.3, y - 0.05, f"{alone[group]}", va="center")
    place = hit / BLOCK
    axes.plot([place, place], [-0.1, 5.45], color="#1d7a4c", linewidth=2.2)
    axes.text(place, 5.95, f"hit: {hit} tokens", ha="center", color="#1d7a4c", fontweight="bold")
    axes.plot([COMMON / BLOCK] * 2, [-0.1, 5.45], color=EDGE, linewidth=1, linestyle="--", zorder=0)
    axes.text(COMMON / BLOCK + 0.1, 5.95, f"prompts agree up to {COMMON}", fontsize=8.5, color=EDGE)
    keys = ((HIT, "shared with the cached request"), (NEW, "handed out"), (CACHED, "cached"))
    for at, (colour, text) in zip((-3.9, 0.6, 2.9), keys, strict=True):
        axes.add_patch(Rectangle((at, -0.66), 0.35, 0.3, facecolor=colour, edgecolor=EDGE, linewidth=0.7))
        axes.text(at + 0.5, -0.51, text, va="center", fontsize=8.5)
    axes.text(4.6, -0.51, "dotted: no block is held", va="center", fontsize=8.5)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes `hit.svg`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where to write the picture")
    parser.add_argument("--png", action="store_true", help="as PNG instead of SVG")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    draw(options.folder / ("hit.png" if options.png else "hit.svg"))


if __name__ == "__main__":
    main()
