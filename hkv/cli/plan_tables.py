"""How `hkv plan` shows a plan on a terminal."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hkv.cli.byte_size import show_bytes
from hkv.planning.report import runs, waste
from hkv.planning.served import ServedPlan


def print_served(report: dict[str, Any], served: ServedPlan) -> None:
    """Prints groups, what fits, and every tensor."""
    console = Console(soft_wrap=False)
    console.print(_heading(report), highlight=False)
    console.print(_groups(report, served))
    fits = report["fits"]
    lines = [
        f"layout {report['layout']}; blocks of {show_bytes(report['bytes_per_block'])} over all layers",
        f"blocks {report['num_blocks']:,}, one of them the null block; hits at multiples of "
        f"{report['scheduler_block_size']} tokens, hashes every {report['hash_block_size']}",
        f"fits {fits['requests']} requests of {report['max_model_len']:,} tokens at once ({fits['tokens']:,} tokens), "
        f"by simulation; {fits['reserved_concurrency'] or 0:.2f} by reservation",
        f"limited by {fits['limited_by']}",
    ]
    if (replicas := max(report["tp_replicas"])) > 1:
        lines.append(f"{replicas} tensor-parallel ranks in a row hold the same bytes")
    console.print("\n".join(lines), highlight=False)
    for stage, tensors in enumerate(report["tensors"]):
        console.print(_tensors(f"stage {stage}" if len(report["tensors"]) > 1 else "tensors", tensors))


def _heading(report: dict[str, Any]) -> str:
    model = report["model"]
    return (
        f"{model['model_type']}: {model['num_layers']} layers; {model['token_bytes']:,.0f} bytes a token and "
        f"{model['sequence_bytes']:,} a sequence; with full attention throughout {model['token_bytes_if_all_full']:,}"
    )


def _groups(report: dict[str, Any], served: ServedPlan) -> Table:
    table = Table(title="groups", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("group")
    table.add_column("layers")
    table.add_column("kind", no_wrap=True)
    for name in ("tokens a block", "KiB a block", "unused", "blocks a request", "at peak"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for index, (group, planned) in enumerate(zip(report["groups"], served.plan.groups, strict=True)):
        table.add_row(
            f"g{index}" + (" draft" if group["eagle"] else ""),
            runs(group["layers"]),
            group["kind"] + (" +" if group["mixed"] else ""),
            f"{group['block_size']:,}",
            f"{group['bytes_per_block'] / 1024:,.1f}",
            f"{waste(planned, report['bytes_per_block']):.1%}",
            f"{group['full_length_blocks']:,}",
            f"{group['peak_blocks']:,}",
        )
    return table


def _tensors(title: str, tensors: list[dict[str, Any]]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("layers")
    for name in ("offset", "shape L,B,H,N,C", "strides in bytes", "size"):
        table.add_column(name, justify="right")
    for tensor in tensors:
        table.add_row(
            runs(tensor["layers"]),
            f"{tensor['offset']:,}",
            " ".join(map(str, tensor["shape"])),
            " ".join(map(str, tensor["strides"])),
            show_bytes(tensor["size"]),
        )
    return table


def print_pools(report: dict[str, Any]) -> None:
    """Prints RTP-LLM's groups and pools."""
    console = Console(soft_wrap=False)
    console.print(_heading(report), highlight=False)
    table = Table("group", "type", "kind", title=f"{report['pools']} pool{'s' * (report['pools'] != 'shared')}")
    for name in ("layers", "block size", "kernel blocks", "payload", "stride", "scale stride", "padding", "blocks"):
        table.add_column(name, justify="right")
    for group in report["groups"]:
        table.add_row(
            group["tag"],
            group["type"],
            group["kind"],
            str(len(group["layers"])),
            f"{group['block_size']:,}",
            str(group["kernel_blocks"]),
            f"{group['payload_bytes']:,}",
            f"{group['stride']:,}",
            f"{group['scale_stride']:,}",
            f"{group['padding_bytes']:,}",
            f"{group['num_blocks']:,}",
        )
    console.print(table)
    console.print(
        f"blocks {report['num_blocks']:,} of {show_bytes(report['bytes_per_block'])}, block 0 reserved; "
        f"{show_bytes(report['reserve_bytes'])} for pools of a fixed size",
        highlight=False,
    )
