"""`hkv layout`: where a block's bytes lie, and which byte is which element."""

from __future__ import annotations

import dataclasses
import os
import re
from fractions import Fraction
from typing import Any

import click
from rich.table import Table

from hkv.cli.layout_drawing import (
    check_place,
    figure,
    held,
    planned_views,
    print_views,
    selected,
    terminal,
    view_record,
)
from hkv.cli.options import command_of, is_given, refuse_given
from hkv.cli.output_option import OutputPath, Reported, console, table, talks, write_json, write_output
from hkv.contract.options import TOKENS, group, option
from hkv.errors import HKVError, LayoutError
from hkv.layout.block_layout import Layout, Place, copy_width
from hkv.layout.content import QUANTIZATIONS, quantize
from hkv.layout.orders import ENVIRONMENT, resolve
from hkv.layout.picture import levels
from hkv.limits import MAX_BYTES
from hkv.spec import LayerSpec, attention_of, spec_from_text
from hkv.spec.dtypes import item_bytes

BYTES = click.IntRange(1, MAX_BYTES)
"""Bytes, or things that take one at least: of those the layout says how many fit."""


BYTE = click.IntRange(0, MAX_BYTES)
"""Type of an option that takes the offset of a byte."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """Geometry of the layer, as far as its kind has it."""

    kv_heads: int = option(1, type=TOKENS, help="Key/value heads on this rank.")
    head_size: int = option(128, type=TOKENS, help="Elements of a key, or of a latent.")
    head_size_v: int | None = option(type=TOKENS, help="Elements of a value, if not as many.")
    dtype: str = option("bfloat16", help="Element type.")
    quantization: str | None = option(metavar="NAME", help=f"Packing: {', '.join(QUANTIZATIONS)}.")
    tokens_per_state: str = option("1", metavar="N", help="Tokens that share a state; or 1/K.")
    states: tuple[str, ...] = option((), "--state", metavar="AxBxC:DTYPE", help="A Mamba layer's state; repeatable.")
    entry_bytes: int = option(1, type=BYTES, help="Bytes of an opaque ring's entry.")
    page_size: int | None = option(type=BYTES, metavar="BYTES", help="Bytes of a padded page.")
    alignment: int | None = option(type=BYTES, metavar="BYTES", help="Bytes to which blocks are aligned.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Places of the pool's blocks."""

    num_blocks: int = option(4, type=BYTES, help="Blocks in the pool.")
    num_layers: int = option(2, type=BYTES, help="Layers of this kind.")
    layer_stride: int | None = option(
        type=BYTES, metavar="BYTES", help="From one layer to the next, if not as close as can be."
    )
    block_stride: int | None = option(
        type=BYTES, metavar="BYTES", help="From one block to the next, if not as close as can be."
    )
    offset: int = option(0, type=BYTE, metavar="BYTES", help="Where the first layer starts.")
    kernel_block_size: int | None = option(type=TOKENS, metavar="TOKENS", help="Tokens of a kernel's block.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LayoutOptions(Reported):
    spec_text: str | None = option(
        None, "--spec", metavar="KIND:BLOCK[:N...]", help="The layer, e.g. full:16, swa:16:1024."
    )
    plan_path: str | None = option(
        None, "--plan", metavar="FILE", help="In its stead, a plan with pools: hkv plan --json FILE."
    )
    layer: int | None = option(type=BYTE, metavar="N", help="With --plan: this layer alone.")
    tag: str | None = option(metavar="TAG", help="With --plan: this group alone.")
    pool: int = option(0, type=BYTE, metavar="N", help="With --plan: the pool of --byte.")
    geometry: Geometry = group(Geometry)
    order: str | None = option(
        None, "--layout", metavar="ORDER", help=f"LBHNC and its kin, NHD or HND; else {ENVIRONMENT}, else NHD."
    )
    places: Places = group(Places)
    addresses: tuple[str, ...] = option(
        (), "--address", metavar="L,B,H,T,C", help="Layer, block, head, token, channel: which byte?"
    )
    offsets: tuple[int, ...] = option((), "--byte", type=BYTE, metavar="OFFSET", help="What is at this byte?")
    image: str | None = option(
        metavar="FILE",
        type=OutputPath(),
        help="Draw into FILE, which ends in .svg or .png; - for SVG on standard output.",
    )


@command_of("layout", _LayoutOptions)
def command(given: _LayoutOptions) -> None:
    """Draw where the bytes of a block lie, and answer for addresses.

    The drawing zooms from the buffer into one cell: the one that --address or --byte names, else the first. A channel
    counts the elements of a (head, token) in memory order, K before V; PART:INDEX, as in value_scale:0, counts those of
    one part. Where a block is a snapshot of a state, the token is 0.

    Of a plan that lays out pools it says where each layer's parts lie, and which elements --byte belongs to.

    Example: hkv layout --spec full:16 --kv-heads 8 --layout BLHNC --num-layers 32 --address 1,3,2,5,130
    """
    if given.plan_path is not None:
        _show_plan(given.plan_path, given)
        return
    refuse_given(["layer", "tag", "pool"], "nothing without --plan, whose layers they choose among")
    if given.spec_text is None:
        raise click.UsageError("Missing option '--spec'.")
    spec = _spec(given.spec_text, given.geometry)
    order = resolve([spec], explicit=given.order, environment=os.environ.get(ENVIRONMENT)).order
    layout = Layout.of_spec(spec, order, **dataclasses.asdict(given.places))
    found = [_address(layout, text) for text in given.addresses]
    held = [_element(layout, byte) for byte in given.offsets]
    result = {"layout": _description(layout), "addresses": found, "bytes": held}
    if given.image:
        drawn = levels(layout, _place(layout, [*found, *held]))
        write_output(given.image, figure(drawn, _names(layout), _title(layout, given.spec_text), given.image))
    if talks(given.json_path, given.image):
        _print(layout, given.spec_text, found, held)
    write_json(given.json_path, result)


OF_PLANS = ("plan_path", "layer", "tag", "pool", "offsets", "json_path")
"""Parameters that have a meaning with --plan."""


def _show_plan(path: str, given: _LayoutOptions) -> None:
    """Answers about the pools of a plan."""
    names = [parameter.name for parameter in click.get_current_context().command.params]
    refuse_given([name for name in names if name and name not in OF_PLANS], "nothing with --plan, which has the layers")
    planned, pool = planned_views(path), given.pool
    if given.offsets or is_given("pool"):
        check_place(planned, pool, given.offsets)
    views = [view for view in planned if not is_given("pool") or view.pool == pool]
    views = selected(views, given.layer, given.tag)
    found = [answer for byte in given.offsets for answer in held(views, pool, byte)]
    shown = [] if given.offsets else [view_record(view) for view in views]
    if talks(given.json_path):
        print_views(shown, found)
    write_json(given.json_path, {"views": shown, "bytes": found})


OF_ATTENTION = ("kv_heads", "head_size", "head_size_v", "dtype", "quantization", "tokens_per_state", "alignment")
OF_SORTS = {"attention": OF_ATTENTION, "states": ("states",), "entries": ("entry_bytes",)}
"""Parameters that describe layers of one kind only."""


def _spec(text: str, given: Geometry) -> LayerSpec:
    spec = spec_from_text(text)
    attention = attention_of(spec)
    sort = "attention" if attention else "states" if spec.state_tensors else "entries"
    foreign = [name for other, names in OF_SORTS.items() if other != sort for name in names]
    refuse_given(foreign, f"nothing with a layer of kind {spec.written.short_name}")
    if attention is None:
        fields: dict[str, Any] = {"page_size_padded": given.page_size}
        if sort == "entries":
            return dataclasses.replace(spec, entry_bytes=given.entry_bytes, **fields)
        shapes, dtypes = zip(*([_state(state) for state in given.states] or spec.state_tensors), strict=True)
        return dataclasses.replace(spec, shapes=shapes, dtypes=dtypes, **fields)
    value = {} if given.head_size_v is None else {"head_size_v": given.head_size_v}
    attention = dataclasses.replace(
        attention,
        num_kv_heads=given.kv_heads,
        head_size=given.head_size,
        dtype=given.dtype,
        tokens_per_state=_tokens_per_state(given.tokens_per_state),
        block_stride_alignment=given.alignment,
        **value,
    )
    if given.quantization is not None:
        attention = quantize(attention, given.quantization)
    return attention if given.page_size is None else dataclasses.replace(attention, page_size_padded=given.page_size)


def _state(text: str) -> tuple[tuple[int, ...], str]:
    shape, _, dtype = text.partition(":")
    if not re.fullmatch(r"[0-9]{1,19}(x[0-9]{1,19})*", shape) or not dtype:
        raise LayoutError("--state", text, "a shape and a dtype, as in 64x128:float32")
    return tuple(int(extent) for extent in shape.split("x")), dtype


def _tokens_per_state(text: str) -> int | Fraction:
    try:
        share = Fraction(text if re.fullmatch(r"[0-9]{1,10}(/[0-9]{1,10})?", text) else "")
    except (ValueError, ZeroDivisionError):
        raise LayoutError("--tokens-per-state", text, "a number of tokens, or a fraction 1/K") from None
    return int(share) if share.denominator == 1 else share


def _address(layout: Layout, text: str) -> dict[str, Any]:
    """Address of an element, from `layer,block,head,token,channel` or `...,PART:INDEX`."""
    fields = text.split(",")
    if len(fields) != 5 or not all(re.fullmatch(r"-?[0-9]{1,19}", field.strip()) for field in fields[:4]):
        raise LayoutError("--address", text, "layer,block,head,token,channel, the channel a number or PART:INDEX")
    layer, block, head, token = (int(field) for field in fields[:4])
    part, index = _channel(layout, fields[4].strip())
    state = layout.states_of(token).start if layout.tokens_per_state is not None else token
    address = layout.element_address(part, layer, block, head, state, *index)
    return _element(layout, address)


def _channel(layout: Layout, text: str) -> tuple[str, tuple[int, ...]]:
    name, colon, number = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,19}", number):
        raise LayoutError("--address", text, "a channel: a number or PART:INDEX")
    rest = int(number)
    for part in [layout.part(name)] if colon else layout.content:
        elements = part.nbytes // item_bytes(part.dtype)
        if rest < elements or colon:
            return part.name, _unravel(rest, part.shape, text)
        rest -= elements
    total = sum(part.nbytes // item_bytes(part.dtype) for part in layout.content)
    raise LayoutError("channel", int(number), f"a number from 0 to {total - 1}")


def _unravel(number: int, shape: tuple[int, ...], text: str) -> tuple[int, ...]:
    index: list[int] = []
    for extent in reversed(shape):
        number, inside = divmod(number, extent)
        index.append(inside)
    if number:
        raise LayoutError("channel", text, f"an element of shape {shape}")
    return tuple(reversed(index))


def _element(layout: Layout, byte: int) -> dict[str, Any]:
    """Element that a byte belongs to, as the tables and the JSON show it."""
    found = layout.locate_element(byte)
    if found is None:
        return {"byte": byte, "part": None}
    part = layout.part(found.part)
    row = layout.kernel_rows(found.block)[found.state // layout.shape[3]]
    tokens = layout.tokens_per_state
    return {
        "byte": byte,
        "part": found.part,
        "dtype": part.dtype,
        "layer": found.layer,
        "block": found.block,
        "kernel_block": row,
        "head": found.head,
        "state": found.state,
        "token": None if tokens is None else int(found.state * Fraction(tokens)),
        "index": list(found.index),
        "byte_of_element": found.byte,
    }


def _place(layout: Layout, answers: list[dict[str, Any]]) -> Place:
    """The cell to zoom into: that of the first answer that is one, else the first of all."""
    for answer in answers:
        if answer["part"] is not None:
            part = layout.part(answer["part"])
            head = answer["head"] if part.steps is None else part.first_head
            return Place(answer["layer"], answer["block"], head, answer["state"], 0)
    return Place(0, 0, 0, 0, 0)


def _names(layout: Layout) -> list[str]:
    return [part.name for part in layout.content]


def _title(layout: Layout, spec_text: str) -> str:
    alias = f" ({layout.order.alias})" if layout.order.alias else ""
    return f"{spec_text} in {layout.order.value}{alias}: pages of {layout.page_size:,} bytes"


def _description(layout: Layout) -> dict[str, Any]:
    return {
        "order": layout.order.value,
        "shape": list(layout.shape),
        "strides": list(layout.strides),
        "offset": layout.offset,
        "end": layout.end,
        "page_bytes": layout.page_size,
        "kernel_blocks_per_block": layout.split,
        "block_runs": [list(run) for run in layout.block_runs(0, 0)],
        "copy_width": copy_width(layout.offset, *layout.strides[:2], *layout.block_runs(0, 0)[0]),
        "parts": [_part(layout, name) for name in _names(layout)],
    }


def _part(layout: Layout, name: str) -> dict[str, Any]:
    part = layout.part(name)
    entry: dict[str, Any] = {"name": name, "dtype": part.dtype, "elements": list(part.shape)}
    try:
        view = layout.part_view(name, 0)
    except HKVError as error:
        return {**entry, "refused": str(error)}
    return {**entry, "shape": list(view.shape), "strides": list(view.strides), "offset": view.offset}


def _print(layout: Layout, spec_text: str, found: list[dict[str, Any]], held: list[dict[str, Any]]) -> None:
    out = console(wide=False, highlight=False)
    out.print(f"[bold]{_title(layout, spec_text)}[/bold], {layout.end:,} bytes in all\n")
    boxes = terminal(levels(layout, _place(layout, [*found, *held])), _names(layout), min(out.width, 132))
    out.print(boxes, highlight=False, no_wrap=True)
    out.print(_axes_table(layout))
    out.print(_parts_table(layout))
    if found or held:
        out.print(_answers_table(layout, [*found, *held]))


def _axes_table(layout: Layout) -> Table:
    names = {"L": "layers", "B": "blocks", "H": "heads", "N": "states", "C": "content bytes"}
    names |= {"B": "kernel blocks"} if layout.split > 1 else {}
    rows = (
        (f"{'LBHNC'[axis]}  {names['LBHNC'[axis]]}", f"{layout.shape[axis]:,}", f"{layout.strides[axis]:,}")
        for axis in layout.order.axes
    )
    return table("axis|>extent|>stride in bytes", rows, title="Axes, outermost first")


def _parts_table(layout: Layout) -> Table:
    made = table("part|dtype|>shape|>strides|>offset", title="Views of layer 0, strides in bytes")
    for name in _names(layout):
        entry = _part(layout, name)
        if "refused" in entry:
            made.add_row(name, entry["dtype"], "refused", entry["refused"], "")
            continue
        shape, strides = (", ".join(f"{n:,}" for n in entry[key]) for key in ("shape", "strides"))
        made.add_row(name, entry["dtype"], shape, strides, f"{entry['offset']:,}")
    return made


def _answers_table(layout: Layout, answers: list[dict[str, Any]]) -> Table:
    columns = ["layer", "block", "head", "token", "state"]
    if layout.split > 1:
        columns.insert(2, "kernel_block")
    if layout.tokens_per_state in (None, 1):
        columns.remove("token" if layout.tokens_per_state is None else "state")
    made = table("|".join([">byte", *(f">{column.replace('_', ' ')}" for column in columns), "holds"]), title="Bytes")
    for answer in answers:
        if answer["part"] is None:
            made.add_row(f"{answer['byte']:,}", *[""] * len(columns), "padding, or another tensor")
            continue
        index = ", ".join(map(str, answer["index"]))
        holds = f"{answer['part']}[{index}] {answer['dtype']}, byte {answer['byte_of_element']}"
        made.add_row(f"{answer['byte']:,}", *(f"{answer[key]:,}" for key in columns), holds)
    return made
