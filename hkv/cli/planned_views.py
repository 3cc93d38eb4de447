"""Views of a plan's layers for `hkv layout --plan`: where each lies in its pool, and which element a byte is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hkv.errors import ConfigError
from hkv.input_file import decode_json, read_whole
from hkv.layout.strided import StridedView


class PlannedView(NamedTuple):
    """A part of one layer's cache.

    Attributes:
      layer: index of the layer.
      tag: its group.
      pool: index of the pool.
      part: name of the part.
      view: `[rows, heads, states, ...]` of the pool's bytes.
      kernel_blocks: rows of a block.
    """

    layer: int
    tag: str
    pool: int
    part: str
    view: StridedView
    kernel_blocks: int


def planned_views(path: str) -> list[PlannedView]:
    """All views of the plan that `hkv plan --json FILE` wrote.

    Raises:
      FileError: the file cannot be read.
      ConfigError: it is no plan that lays out pools.
    """
    expected = "a plan that lays its pools out, as hkv plan --json writes it under a dialect with layer caches"
    report = decode_json(read_whole(path), path, None, expected)
    try:
        return [
            PlannedView(int(layer), cache["tag"], cache["pool"], part, _view(view), cache["kernel_blocks"])
            for layer, caches in report["layer_caches"].items()
            for cache in caches
            for part, view in cache["parts"].items()
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError("--plan", path, expected) from error


def _view(fields: dict[str, Any]) -> StridedView:
    return StridedView(tuple(fields["shape"]), tuple(fields["strides"]), fields["offset"], fields["dtype"])


def selected(views: Sequence[PlannedView], layer: int | None, tag: str | None) -> list[PlannedView]:
    """The views of a layer and of a group, or all.

    Raises:
      ConfigError: there is no such layer, or not in that group.
    """
    layers = sorted({view.layer for view in views})
    if layer is not None and layer not in layers:
        raise ConfigError("--layer", layer, f"a layer of the plan, from {layers[0]} to {layers[-1]}")
    mine = [view for view in views if layer in (None, view.layer)]
    if tag is not None and tag not in {view.tag for view in mine}:
        raise ConfigError("--tag", tag, f"one of {', '.join(dict.fromkeys(view.tag for view in mine))}")
    return [view for view in mine if tag in (None, view.tag)]


def check_place(views: Sequence[PlannedView], pool: int, offsets: Sequence[int]) -> None:
    """Checks that a plan has a pool, and the pool those bytes.

    Raises:
      ConfigError: it has not.
    """
    pools = sorted({view.pool for view in views})
    if pool not in pools:
        raise ConfigError("--pool", pool, f"a pool of the plan, from {pools[0]} to {pools[-1]}")
    end = max(planned.view.end for planned in views if planned.pool == pool)
    for byte in offsets:
        if byte >= end:
            raise ConfigError("--byte", byte, f"less than {end}, where the last element of pool {pool} ends")


def held(views: Sequence[PlannedView], pool: int, byte: int) -> list[dict[str, Any]]:
    """Elements that a byte of a pool belongs to: one a group where groups share a pool.

    Where there is none, one record says so, with no `part`: padding, or an element of a layer that was not chosen.
    """
    found = []
    for planned in views:
        place = planned.view.locate(byte) if planned.pool == pool else None
        if place is not None:
            (row, head, state, *index), inside = place
            block, kernel_block = divmod(row, planned.kernel_blocks)
            found.append(
                {
                    "byte": byte,
                    "pool": pool,
                    "layer": planned.layer,
                    "tag": planned.tag,
                    "block": block,
                    "kernel_block": kernel_block,
                    "part": planned.part,
                    "head": head,
                    "state": state,
                    "index": index,
                    "dtype": planned.view.dtype,
                    "byte_of_element": inside,
                }
            )
    return found or [{"byte": byte, "pool": pool, "part": None}]


def view_record(planned: PlannedView) -> dict[str, Any]:
    """A view as plain values."""
    view = planned.view
    return {
        "layer": planned.layer,
        "tag": planned.tag,
        "pool": planned.pool,
        "part": planned.part,
        "dtype": view.dtype,
        "shape": list(view.shape),
        "strides": list(view.strides),
        "offset": view.offset,
    }


def print_views(views: Sequence[dict[str, Any]], bytes_held: Sequence[dict[str, Any]]) -> None:
    """Prints views and answers, each as a table."""
    console = Console(highlight=False)
    if views:
        console.print(_table("Views, strides in bytes", views))
    if elements := [answer for answer in bytes_held if answer["part"] is not None]:
        console.print(_table("Bytes", elements))
    for answer in bytes_held:
        if answer["part"] is None:
            console.print(f"byte {answer['byte']} of pool {answer['pool']}: padding, or no element of a chosen layer")


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(
            *(", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in row.values())
        )
    return table
