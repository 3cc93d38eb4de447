"""How `hkv plan` shows a plan on a terminal, 80 columns and up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hkv.byte_size import show_bytes
from hkv.dialects.vllm.planning.plan import PlannedGroup
from hkv.dialects.vllm.planning.report import runs, waste
from hkv.dialects.vllm.planning.served import ServedPlan

SHORT_KINDS = {"opaque_kv": "kv", "opaque_state": "state"}
"""RTP-LLM's kinds of blocks, where a table has no room for their names."""


def print_served(report: dict[str, Any], served: ServedPlan) -> None:
    """Prints groups, what fits, and every tensor."""
    console = Console(soft_wrap=False)
    fits, unit = report["fits"], report["hash_block_size"]
    hits = f"at multiples of {report['scheduler_block_size']:,} tokens; a hash every {unit:,}"
    facts = [
        *_model_facts(report),
        ("a block", f"{show_bytes(report['bytes_per_block'])} over all layers, layout {report['layout']}"),
        ("blocks", f"{report['num_blocks']:,}, one of them the null block"),
        ("hits", hits),
        (
            "fits",
            f"{fits['requests']:,} requests of {report['max_model_len']:,} tokens at once, {fits['tokens']:,} tokens, "
            f"by simulation; {fits['reserved_concurrency'] or 0:.2f} by reservation",
        ),
        ("limited by", fits["limited_by"]),
    ]
    if (replicas := max(report["tp_replicas"])) > 1:
        facts.append(("replicas", f"{replicas} tensor-parallel ranks in a row hold the same bytes"))
    _print_facts(console, facts)
    console.print(_groups(report, served))
    for stage, tensors in enumerate(report["tensors"]):
        console.print(_tensors(f"stage {stage}" if len(report["tensors"]) > 1 else "tensors", tensors))


def _model_facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    model = report["model"]
    return [
        ("model", f"{model['model_type']}, {model['num_layers']} layers"),
        (
            "a token",
            f"{show_bytes(model['token_bytes'])}; {show_bytes(model['token_bytes_if_all_full'])} with full attention "
            "throughout",
        ),
        ("a sequence", f"{show_bytes(model['sequence_bytes'])} of windows and states beside its tokens"),
    ]


def _print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in facts:
        table.add_row(name, text)
    console.print(table, highlight=False)
    console.print()


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def kind_text(group: PlannedGroup) -> str:
    """A group's kind as `hkv replay --groups` names it, with its window or chunk; `+` if it holds several kinds."""
    spec = group.spec
    size = f" {getattr(spec, spec.parameter)}" if spec.parameter else ""
    return f"{spec.short_name}{size}{' +' * group.mixed}"


def _groups(report: dict[str, Any], served: ServedPlan) -> Table:
    table = _table("groups")
    table.add_column("group", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("layers")
    for name in ("tokens\na block", "KiB\na block", "unused", "blocks a\nrequest", "at peak"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, (group, planned) in enumerate(zip(report["groups"], served.plan.groups, strict=True)):
        table.add_row(
            f"g{index}" + (" draft" if group["eagle"] else ""),
            kind_text(planned),
            runs(group["layers"]),
            f"{group['block_size']:,}",
            f"{group['bytes_per_block'] / 1024:,.1f}",
            f"{waste(planned, report['bytes_per_block']):.1%}",
            f"{group['full_length_blocks']:,}",
            f"{group['peak_blocks']:,}",
        )
    return table


def _tensors(title: str, tensors: list[dict[str, Any]]) -> Table:
    """Two lines a tensor: extents of the axes, and below them their strides in bytes."""
    sizes = " and ".join(dict.fromkeys(show_bytes(tensor["size"]) for tensor in tensors))
    table = _table(f"{title} in a buffer of {sizes}: extent of each axis, its stride in bytes below")
    table.add_column("layers")
    for name in ("offset", "L", "B", "H", "N", "C"):
        table.add_column(name, justify="right", no_wrap=True)
    for tensor in tensors:
        cells = (f"{n}\n{stride}" for n, stride in zip(tensor["shape"], tensor["strides"], strict=True))
        table.add_row(runs(tensor["layers"]), str(tensor["offset"]), *cells)
    return table


def print_pools(report: dict[str, Any]) -> None:
    """Prints RTP-LLM's groups and pools."""
    console = Console(soft_wrap=False)
    facts = [
        *_model_facts(report),
        ("blocks", f"{report['num_blocks']:,} of {show_bytes(report['bytes_per_block'])}, block 0 reserved"),
        ("fixed pools", show_bytes(report["reserve_bytes"])),
    ]
    if (ranks := report["ranks"]) > 1:
        facts.append(("capacity", f"{report['token_capacity']:,} tokens, their blocks dealt out to {ranks} ranks"))
    if modules := report["draft_modules"]:
        facts.append(("draft", _modules_text(modules)))
    _print_facts(console, facts)
    shared = report["pools"] == "shared"
    table = _table("groups in one shared pool" if shared else "groups, each with a pool of its own")
    columns: dict[str, list[str]] = {
        "group": [group["tag"] for group in report["groups"]],
        "type": [group["type"] for group in report["groups"]],
        "kind": [_short_kind(group["kind"]) for group in report["groups"]],
        "layers": [str(len(group["layers"])) for group in report["groups"]],
        "tokens\na block": _numbers(report, "block_size"),
        "kernel\nblocks": _numbers(report, "kernel_blocks", unless=1),
        "bytes\na block": _numbers(report, "stride"),
        "padding": _numbers(report, "padding_bytes"),
        "scales": _numbers(report, "scale_stride", unless=0),
        "blocks": _numbers(report, "num_blocks"),
    }
    shown = {name: cells for name, cells in columns.items() if cells}
    for position, name in enumerate(shown):
        table.add_column(name, justify="left" if position < 3 else "right", no_wrap=True)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def _modules_text(modules: list[list[dict[str, Any]]]) -> str:
    """Which groups the draft modules' layers join: `2 modules: layers 48, 49 in full`."""
    layers: dict[str, list[int]] = {}
    for group in (group for module in modules for group in module):
        layers.setdefault(group["tag"], []).extend(group["layers"])
    joined = [f"{', '.join(map(str, numbers))} in {tag}" for tag, numbers in layers.items() if numbers]
    return f"{len(modules)} module{'s' * (len(modules) > 1)}: layers {'; '.join(joined)}"


def _short_kind(kind: str) -> str:
    return SHORT_KINDS.get(kind, kind)


def _numbers(report: dict[str, Any], name: str, unless: int | None = None) -> list[str]:
    """A column of the groups' numbers; empty if all are `unless`."""
    numbers = [group[name] for group in report["groups"]]
    return [] if set(numbers) == {unless} else [f"{number:,}" for number in numbers]
