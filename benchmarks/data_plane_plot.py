"""The roofline of `data_plane.py`: GB/s against the size of a gapless piece, under the device's own copy."""

from __future__ import annotations

import pathlib
from typing import Any

OPERATIONS = ("gather", "scatter", "write", "copy", "pack", "unpack")
"""One panel each; decode steps and copies of lists that do not overlap are in the table alone."""

MARKERS = {"xla": "o", "mosaic": "s", "pallas_triton": "^", "triton": "v", "jnp": "x", "torch": "+", "lmcache": "D"}


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """One panel an operation, one marker an implementation; the line is the copy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.5), sharex=True, sharey=True, layout="constrained")
    device = report["device"]
    copy = device["copy_gb_per_s"]
    for axis, operation in zip(axes.flat, OPERATIONS, strict=True):
        rows = [row for row in report["rows"] if row["operation"] == operation]
        for name, marker in MARKERS.items():
            mine = sorted((row["run_bytes"], row["gb_per_s"]) for row in rows if row["implementation"] == name)
            if mine:
                sizes, speeds = zip(*mine, strict=True)
                axis.plot(sizes, speeds, marker, label=name, markersize=7, alpha=0.8)
        axis.axhline(copy, color="black", linewidth=1)
        axis.axhline(0.9 * copy, color="black", linewidth=0.8, linestyle=":")
        axis.set(title=operation, xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
        axis.grid(True, alpha=0.3)
        if rows:
            axis.legend(fontsize=8, loc="lower right")
    for axis in axes[-1]:
        axis.set_xlabel("bytes of a gapless piece")
    for axis in axes[:, 0]:
        axis.set_ylabel("GB/s, read and written")
    figure.suptitle(
        f"Paged data movement on {device['platform']} ({device['kind']}); line: plain copy, {copy:.0f} GB/s; "
        "dotted: 90 % of it"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
