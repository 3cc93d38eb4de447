"""Which cache `hkv replay` studies: groups and blocks as they are given, or what a model's plan makes of a memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from hkv.byte_size import parse_bytes, show_bytes
from hkv.dialects.rtp_llm.config import RtpConfig
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.schedule import planned
from hkv.dialects.vllm.schedule.run import cache_config
from hkv.errors import ConfigError
from hkv.model.huggingface import ReadOptions, load_config, read_model
from hkv.replay import summary
from hkv.request_length import parse_length
from hkv.replay.schedule import Schedule

FOR_GROUPS = ("num_blocks",)
FOR_MODELS = ("memory", "tp", "block_size", "kv_dtype", "draft")


@dataclasses.dataclass(frozen=True)
class StudiedCache:
    """The cache of a replay, and what the command says about it.

    Attributes:
      config: the cache.
      schedule: the numbers that steer the replay; its longest request is the cache's.
      name: names the cache in a plot's title.
      remark: one line on the plan it comes from, or "".
    """

    config: VllmConfig | RtpConfig
    schedule: Schedule
    name: str
    remark: str = ""


def studied_cache(options: dict[str, Any]) -> StudiedCache:
    """The cache that the command's options ask for.

    Args:
      options: the command's, by name.

    Raises:
      click.UsageError: both or neither of a model and groups, or an option of the other.
      HKVError: the model, its plan or the groups cannot be used.
    """
    by_model = check_cache_options(options)
    return _of_model(options) if by_model else _of_groups(options)


def check_cache_options(options: dict[str, Any]) -> bool:
    """Whether a model, not groups, says which cache it is.

    Raises:
      click.UsageError: both or neither of them, or an option of the other.
    """
    by_model = options["model"] is not None
    if by_model == (options["groups"] is not None):
        raise click.UsageError("one of --groups, with --num-blocks, and --model, with --memory, says which cache it is")
    needed, other = ("memory", FOR_GROUPS) if by_model else ("num_blocks", FOR_MODELS)
    given, missing = ("--model", "--memory") if by_model else ("--groups", "--num-blocks")
    if options[needed] is None:
        raise click.UsageError(f"{given} wants {missing} beside it")
    for name in other:
        if options[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is not for {given}")
    return by_model


def _of_groups(options: dict[str, Any]) -> StudiedCache:
    schedule = schedule_for_groups(options)
    if len(options["num_blocks"]) != 1:
        raise ConfigError("num_blocks", list(options["num_blocks"]), "one number: vllm-0.33 has one pool")
    config = cache_config(
        options["groups"],
        options["num_blocks"][0],
        schedule,
        caching=options["caching"],
        eagle=options["eagle"],
        retention_interval=options["retention"],
    )
    return StudiedCache(config, schedule, groups_text(options))


def schedule_for_groups(options: dict[str, Any]) -> Schedule:
    """The schedule's numbers, where no model says how long a request may be."""
    length = parse_length(options["max_model_len"])
    if length == 0:
        raise ConfigError("max_model_len", "auto", "a number of tokens; auto is for --model under vllm-0.33")
    return schedule_of(options, Schedule.max_model_len if length is None else length)


def _of_model(options: dict[str, Any]) -> StudiedCache:
    reading = {"tensor_parallel": options["tp"] or 1, "kv_dtype": options["kv_dtype"] or "auto"}
    model = read_model(
        load_config(options["model"]),
        ReadOptions(block_size=options["block_size"], speculative_tokens=options["lookahead"], **reading),
    )
    draft = None
    if options["draft"] is not None:
        size = next((spec.block_size for spec in model.specs.values()), None)
        draft = read_model(load_config(options["draft"]), ReadOptions(block_size=size, draft=True, **reading))
    served, config = planned.planned_cache(
        model,
        parse_bytes(options["memory"]),
        options["step_tokens"],
        max_model_len=parse_length(options["max_model_len"]),
        draft=draft,
        caching=options["caching"],
        eagle=options["eagle"],
        retention_interval=options["retention"],
    )
    size = max(worker.bytes_per_block for worker in served.plan.workers)
    groups = len(config.topology.groups)
    remark = (
        f"{model.model_type}: {groups} group{'s' * (groups > 1)}, {config.num_blocks:,} blocks of {show_bytes(size)}, "
        f"hits at multiples of {config.scheduler_block_size:,} tokens, requests of up to {config.max_model_len:,}"
    )
    name = f"{model.model_type} in {options['memory']}"
    return StudiedCache(config, schedule_of(options, config.max_model_len), name, remark)


def schedule_of(options: dict[str, Any], max_model_len: int) -> Schedule:
    """The schedule's numbers."""
    names = ("step_tokens", "decode_tokens", "max_running", "lookahead", "closed_loop")
    return Schedule(max_model_len=max_model_len, **{name: options[name] for name in names})


def groups_text(options: dict[str, Any]) -> str:
    """The groups as the command line takes them."""
    return ",".join(summary.group_name(spec) for spec in options["groups"])
