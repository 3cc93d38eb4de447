"""Tables in which `hkv plan` shows a plan of RTP-LLM's on a terminal, 80 columns and up."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hkv.byte_size import show_bytes
from hkv.contract.plan_command import plan_table, print_facts

SHORT_KINDS = {"opaque_kv": "kv", "opaque_state": "state"}
"""RTP-LLM's kinds of blocks, where a table has no room for their names."""


def print_pools(console: Console, report: dict[str, Any]) -> None:
    """Prints groups and pools."""
    facts = [
        ("blocks", _blocks_text(report)),
        ("fixed pools", show_bytes(report["reserve_bytes"])),
        (
            "requests",
            f"{report['requests']:,} of {report['max_model_len']:,} tokens at once, without reuse, beside "
            f"{report['reserve_ratio']} % in reserve; {report['concurrency']:,.2f} in all blocks",
        ),
    ]
    if (ranks := report["ranks"]) > 1:
        facts.append(("capacity", f"{report['token_capacity']:,} tokens, their blocks dealt out to {ranks} ranks"))
    if modules := report["draft_modules"]:
        facts.append(("draft", _modules_text(modules)))
    print_facts(console, report, facts)
    shared = report["pools"] == "shared"
    table = plan_table("groups in one shared pool" if shared else "groups, each with a pool of its own")
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


def _blocks_text(report: dict[str, Any]) -> str:
    """Blocks and what one more costs: of the paged pools, and of the pools of windows, where there are any."""
    costs = [report["bytes_per_block"], report["tail_bytes_per_block"]]
    sizes = [f"{show_bytes(cost)}{' of windows' * tail}" for tail, cost in enumerate(costs) if cost]
    return f"{report['num_blocks']:,} of {' and '.join(sizes)}, block 0 reserved"


def _modules_text(modules: list[list[dict[str, Any]]]) -> str:
    """Groups that the draft modules' layers join, in words: `2 modules: layers 48, 49 in full`."""
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
