"""`hkv plan` under RTP-LLM's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rich.console import Console

from hkv.contract.plan_command import (
    Capacity,
    ModelPlan,
    PlanCommand,
    length_option,
    model_record,
    plan_table,
    print_facts,
)
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import RtpOptions, served_options
from hkv.dialects.rtp_llm.planning.pools import PoolGroup, PoolPlan, capacity_of, reserve_option, reserve_ratio
from hkv.dialects.rtp_llm.planning.sizes import check_kv_dtype
from hkv.errors import ConfigError, PlanError
from hkv.layout.layer_cache import LayerCache
from hkv.limits import parse_length, show_bytes, whole_number
from hkv.model.group_policy import GroupType
from hkv.model.huggingface import Model, ReadOptions, load_config, read_model
from hkv.model.huggingface.common_fields import served_dtype
from hkv.model.huggingface.loading import naming_file
from hkv.model.huggingface.reading import decoder_fields, ignored_in

ALIKE = ("block_size", "kernel_block_size", "pools", "role", "prefill_ranks", "state_dtype")
NAMES = {
    **dict(zip(ALIKE, ALIKE, strict=True)),
    "drafts": "speculative_tokens",
    "modules": "draft_modules",
    "tensor_parallel": "tp",
    "ranks": "dcp",
    "step": "linear_step",
    "pinned": "pinned_pools",
}
"""A server's settings, each by its field, and the options of the command that say them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtpPlanOptions(RtpOptions):
    """Settings of a server, the longest request, and what it leaves free."""

    max_model_len: str | None = length_option()
    reserve_ratio: int | None = reserve_option()


class RtpPlanCommand(PlanCommand):
    """A shared pool, or one a group."""

    declared = RtpPlanOptions

    def plan(self, memory: int | None, options: dict[str, Any]) -> ModelPlan:
        model, cache, wanted, capacity = _planned(memory, options)
        pools = pool_report(model, cache.plan, wanted, capacity, reserve_ratio(options))
        report = {**pools, **view_report(cache)}
        return ModelPlan(report, lambda console: print_pools(console, report))

    def capacity(self, memory: int | None, options: dict[str, Any]) -> Capacity:
        return _planned(memory, options)[-1]


def _planned(memory: int | None, options: dict[str, Any]) -> tuple[Model, PlannedCache, RtpOptions, Capacity]:
    """The model, its cache, the settings that it was planned for, and the requests that fit."""
    if memory is None:
        raise PlanError("--memory", None, "bytes for the cache on each GPU, such as 80GiB")
    if options["pp"] > 1:
        raise ConfigError("--pp", options["pp"], "1 with --dialect rtp-llm, which has no pipeline stages")
    if options["dcp"] > 1 and options["tp"] > 1:
        expected = "1 with --dcp: RTP-LLM's ranks either split heads or deal blocks out"
        raise ConfigError("--tp", options["tp"], expected)
    if options["draft_path"] is None and "draft_modules" in options["given"]:
        expected = "--draft CONFIG beside it, the module that is copied"
        raise ConfigError("--draft-modules", options["draft_modules"], expected)
    length = parse_length(options["max_model_len"])
    if length == 0:
        raise ConfigError("--max-model-len", "auto", "a number of tokens with --dialect rtp-llm")
    model, draft = _read_models(options)
    given = {field: options[name] for field, name in NAMES.items() if options[name] is not None}
    asked = RtpOptions(**given, explicit_blocks=tuple(map(_explicit, options["explicit_blocks"])))
    wanted, notes = served_options(model, asked, {name for name in ("block_size", "pools") if options[name]})
    cache = PlannedCache.of_model(model, wanted, memory=memory, draft=draft)
    if layers := cache.plan.unindexed:
        notes.append(
            f"indexer-without-room: RTP-LLM lacks the indexer's keys of {len(layers)} layers from {layers[0]} on"
        )
    capacity = capacity_of(cache.plan, wanted, length or model.max_model_len, reserve_ratio(options))
    return dataclasses.replace(model, notes=(*model.notes, *notes)), cache, wanted, capacity


def _read_models(options: dict[str, Any]) -> tuple[Model, Model | None]:
    """The model that the options name, and its draft module, if any.

    Both are read whole: RTP-LLM's own rule splits heads, a rank holds whole blocks, and float8 is one type there.
    """
    config, kv_dtype = load_config(options["config"]), options["kv_dtype"]
    check_kv_dtype(kv_dtype, options["dtype"] or _computed_with(config))
    drafted, ignored = options["draft_path"] and load_config(options["draft_path"]), options["ignore_fields"]
    reading = {name: options[name] for name in ("dtype", "strict")}
    reading["kv_dtype"] = "fp8" if kv_dtype == "fp8_e4m3" else kv_dtype
    of_model = {name: options[name] for name in ("block_size", "speculative_tokens")}
    of_model["ignore_fields"] = ignored_in(config, ignored, drafted)
    model = read_model(config, ReadOptions(**of_model, **reading))
    if drafted is None:
        return model, None
    of_draft = {"block_size": next((spec.block_size for spec in model.specs.values()), None), "draft": True}
    of_draft["ignore_fields"] = ignored_in(drafted, ignored, config)
    return model, read_model(drafted, ReadOptions(**of_draft, **reading))


@naming_file
def _computed_with(config: Mapping[str, Any]) -> str:
    return served_dtype(decoder_fields(config))[0]


def _explicit(text: str) -> tuple[str, int]:
    """A group's tag and number of blocks."""
    tag, _, number = text.partition("=")
    count = whole_number(number)
    if not tag or count is None:
        raise ConfigError("--explicit-blocks", text, "TAG=N, such as hca_state=256")
    return tag, count


# The plan as plain values, for `hkv plan --json`, and below them tables for a terminal of 80 columns and up.


def pool_report(model: Model, plan: PoolPlan, options: RtpOptions, fits: Capacity, ratio: int) -> dict[str, Any]:
    """RTP-LLM's plan as plain values."""
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
        "reserve_ratio": ratio,
        "groups": [{**_pool_group(group), "tokens_per_slot": plan.tokens_per_slot(group)} for group in plan.groups],
        "draft_modules": [[_pool_group(group) for group in module] for module in plan.modules],
    }


def _whole_token_bytes(model: Model, plan: PoolPlan) -> int:
    """Bytes of a token if every layer were full attention, all ranks together.

    A state counts as a layer of the first full group.
    """
    if any(group.block.entries for group in plan.groups):
        return model.full_token_bytes  # an opaque region's vectors have no scales next to them
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


def view_report(cache: PlannedCache) -> dict[str, Any]:
    """Bytes of each pool, and each layer's views: their pool, first byte, shape and strides in bytes."""
    groups = [group for groups in (cache.plan.groups, *cache.plan.modules) for group in groups]
    layers = sorted({layer for group in groups for layer in group.layers})
    return {
        "pool_bytes": list(cache.pool_sizes),
        "layer_caches": {str(layer): [_cache(found) for found in cache.layer_cache_groups(layer)] for layer in layers},
    }


def _cache(found: LayerCache) -> dict[str, Any]:
    return {
        "tag": found.tag,
        "pool": found.pool,
        "tokens_per_block": found.tokens_per_block,
        "kernel_blocks": found.kernel_blocks,
        "kv": dataclasses.asdict(found.kv),
        "scale": None if found.scale is None else dataclasses.asdict(found.scale),
        "parts": {name: dataclasses.asdict(part) for name, part in found.parts.items()},
    }


SHORT_KINDS: Mapping[str, str] = {"opaque_kv": "kv", "opaque_state": "state"}
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
        "kind": [SHORT_KINDS.get(group["kind"], group["kind"]) for group in report["groups"]],
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


def _numbers(report: dict[str, Any], name: str, unless: int | None = None) -> list[str]:
    """A column of the groups' numbers; empty if all are `unless`."""
    numbers = [group[name] for group in report["groups"]]
    return [] if set(numbers) == {unless} else [f"{number:,}" for number in numbers]
