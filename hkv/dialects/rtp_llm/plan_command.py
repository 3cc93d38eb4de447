"""`hkv plan` under RTP-LLM's rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hkv.contract.plan_command import Capacity, ModelPlan, PlanCommand, length_option
from hkv.dialects.rtp_llm.planned_cache import PlannedCache
from hkv.dialects.rtp_llm.planning import RtpOptions, served_options
from hkv.dialects.rtp_llm.planning.concurrency import capacity_of, reserve_option, reserve_ratio
from hkv.dialects.rtp_llm.planning.options import ROLES
from hkv.dialects.rtp_llm.planning.report import PlannedModel, pool_report, print_pools
from hkv.dialects.rtp_llm.planning.sizes import check_kv_dtype
from hkv.errors import ConfigError, PlanError
from hkv.layout.layer_cache import LayerCache
from hkv.layout.strided import StridedView
from hkv.limits import MAX_RANKS, MAX_SPECULATIVE_TOKENS, MAX_TOKENS, whole_number
from hkv.model.huggingface import Model, ReadOptions, load_config, read_model
from hkv.model.huggingface.loading import naming_file
from hkv.model.huggingface.reading import decoder_fields
from hkv.model.huggingface.served_dtype import served_dtype
from hkv.request_length import parse_length

BLOCK_SIZE = 64
"""Tokens per block unless told otherwise."""


class RtpPlanCommand(PlanCommand):
    """A shared pool, or one a group."""

    def options(self) -> Sequence[click.Option]:
        return (
            click.Option(
                ["--draft-modules"],
                type=click.IntRange(1, MAX_SPECULATIVE_TOKENS),
                default=1,
                show_default=True,
                help="Copies of the draft, with --dialect rtp-llm.",
            ),
            click.Option(
                ["--pools"],
                type=click.Choice(["shared", "independent"]),
                help="One pool, or one a group; left out, one where the model's groups can share it.",
            ),
            click.Option(
                ["--role"],
                type=click.Choice(ROLES),
                help="Work of the server.  [default: both]",
            ),
            click.Option(
                ["--prefill-ranks"],
                type=click.IntRange(1, MAX_RANKS),
                default=1,
                show_default=True,
                help="Context-parallel ranks of the prefill servers behind a decode server.",
            ),
            click.Option(
                ["--linear-step"],
                type=click.IntRange(0, MAX_TOKENS),
                default=1,
                show_default=True,
                help="Blocks between two kept states, by which pools of windows shrink.",
            ),
            click.Option(["--pinned-pools"], is_flag=True, help="Put pools of rings and windows into pinned memory."),
            click.Option(
                ["--explicit-blocks"],
                multiple=True,
                metavar="TAG=N",
                help="Blocks of the pool of that group; repeatable.",
            ),
            length_option(),
            reserve_option(),
        )

    def plan(self, memory: int | None, options: dict[str, Any]) -> ModelPlan:
        planned = _planned(memory, options)
        report = {**pool_report(planned), **view_report(planned.cache)}
        return ModelPlan(report, lambda console: print_pools(console, report))

    def capacity(self, memory: int | None, options: dict[str, Any]) -> Capacity:
        return _planned(memory, options).capacity


def _planned(memory: int | None, options: dict[str, Any]) -> PlannedModel:
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
    asked = RtpOptions(
        block_size=options["block_size"] or BLOCK_SIZE,
        kernel_block_size=options["kernel_block_size"],
        pools=options["pools"] or "shared",
        drafts=options["speculative_tokens"],
        modules=options["draft_modules"],
        tensor_parallel=options["tp"],
        ranks=options["dcp"],
        step=options["linear_step"],
        pinned=options["pinned_pools"],
        role=options["role"] or "",
        prefill_ranks=options["prefill_ranks"],
        explicit_blocks=tuple(map(_explicit, options["explicit_blocks"])),
        **({"state_dtype": options["state_dtype"]} if options["state_dtype"] else {}),
    )
    wanted, notes = served_options(model, asked, {name for name in ("block_size", "pools") if options[name]})
    cache = PlannedCache.of_model(model, wanted, memory=memory, draft=draft)
    ratio = reserve_ratio(options)
    capacity = capacity_of(cache.plan, wanted, length or model.max_model_len, ratio)
    return PlannedModel(dataclasses.replace(model, notes=(*model.notes, *notes)), cache, wanted, capacity, ratio)


def _read_models(options: dict[str, Any]) -> tuple[Model, Model | None]:
    """The model that the options name, and its draft module, if any.

    Both are read whole: RTP-LLM's own rule splits heads, a rank holds whole blocks, and float8 is one type there.
    """
    config, kv_dtype = load_config(options["config"]), options["kv_dtype"]
    check_kv_dtype(kv_dtype, options["dtype"] or _computed_with(config))
    reading = {name: options[name] for name in ("dtype", "ignore_fields", "strict")}
    reading["kv_dtype"] = "fp8" if kv_dtype == "fp8_e4m3" else kv_dtype
    of_model = {name: options[name] for name in ("block_size", "speculative_tokens")}
    model = read_model(config, ReadOptions(**of_model, **reading))
    if options["draft_path"] is None:
        return model, None
    size = next((spec.block_size for spec in model.specs.values()), None)
    return model, read_model(load_config(options["draft_path"]), ReadOptions(block_size=size, draft=True, **reading))


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


# Pools and views of a planned cache as plain values, for `hkv plan --json`.


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
        "kv": _view(found.kv),
        "scale": None if found.scale is None else _view(found.scale),
        "parts": {name: _view(part) for name, part in found.parts.items()},
    }


def _view(view: StridedView) -> dict[str, Any]:
    return {
        "offset": view.offset,
        "shape": list(view.shape),
        "strides": list(view.strides),
        "dtype": view.dtype,
    }
