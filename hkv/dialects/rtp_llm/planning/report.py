"""RTP-LLM's plan as plain values for `hkv plan --json`."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from rich.console import Console

from hkv.byte_size import show_bytes
from hkv.contract.plan_command import Capacity, model_record, plan_table, print_facts
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning.options import RtpOptions
from hkv.dialects.rtp_llm.planning.pools import PoolGroup, PoolPlan
from hkv.model.group_policy import GroupType
from hkv.model.huggingface import Model


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model, its planned cache, and what fits into it.

    Attributes:
      model: the model.
      cache: its cache.
      options: the settings that it was planned for.
      capacity: requests that fit.
      reserve_ratio: percent of the blocks that a first allocation leaves free.
    """

    model: Model
    cache: PlannedCache
    options: RtpOptions
    capacity: Capacity
    reserve_ratio: int


def pool_report(planned: PlannedModel) -> dict[str, Any]:
    """RTP-LLM's plan as plain values."""
    model, plan, options, fits = planned.model, planned.cache.plan, planned.options, planned.capacity
    return {
        "model": {
            **model_record(model),
            "token_bytes_if_all_full": _whole_token_bytes(model, plan) / plan.ranks,
            "token_bytes": float(plan.token_bytes),
            "sequence_bytes": plan.sequence_bytes,
            "tensor_parallel": options.tensor_parallel,
        },
        "role": options.role,
        "pools": "shared" if plan.shared else "independent",
        "num_blocks": plan.num_blocks,
        "bytes_per_block": plan.bytes_per_block,
        "tail_bytes_per_block": plan.tail_bytes_per_block,
        "reserve_bytes": plan.reserve_bytes,
        "memory": plan.memory,
        "ranks": plan.ranks,
        "token_capacity": plan.token_capacity,
        "max_model_len": fits.max_model_len,
        "concurrency": fits.concurrency,
        "requests": fits.requests,
        "reserve_ratio": planned.reserve_ratio,
        "groups": [{**_pool_group(group), "tokens_per_slot": plan.tokens_per_slot(group)} for group in plan.groups],
        "draft_modules": [[_pool_group(group) for group in module] for module in plan.modules],
    }


def _whole_token_bytes(model: Model, plan: PoolPlan) -> int:
    """Bytes of a token if every layer were full attention, all ranks together.

    A state counts as a layer of the first full group.
    """
    if any(group.block.entries for group in plan.groups):
        return model.full_token_bytes  # an opaque region's vectors have no scales beside them
    full = next((group for group in plan.groups if group.policy.group_type is GroupType.FULL), None)
    total = Fraction(0)
    for group in plan.groups:
        one = full if group.policy.group_type is GroupType.LINEAR else group
        if one is None:
            return model.full_token_bytes
        total += Fraction(len(group.layers) * (one.block.bytes + one.block.scale), one.block.seq_size)
    return int(total)


def _pool_group(group: PoolGroup) -> dict[str, Any]:
    return {
        "tag": group.tag,
        "type": group.policy.group_type.name,
        "kind": group.block.kind,
        "layers": list(group.layers),
        "block_size": group.block.seq_size,
        "kernel_blocks": group.kernel_blocks,
        "block_bytes": group.block.bytes,
        "payload_bytes": group.block.payload,
        "scale_bytes": group.block.scale,
        "stride": group.stride,
        "scale_stride": group.scale_stride,
        "padding_bytes": group.padding_bytes,
        "num_blocks": group.num_blocks,
    }


# Tables in which `hkv plan` shows a plan of RTP-LLM's on a terminal, 80 columns and up.

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
