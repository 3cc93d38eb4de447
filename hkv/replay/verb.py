"""Replaying a trace by names and numbers: `hkv replay` as a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import click

from hkv.contract import registry
from hkv.errors import ConfigError
from hkv.replay.command import check_cache_options
from hkv.replay.result import ReplayResult, result_of
from hkv.replay.run import Timing, default_engine, replay
from hkv.replay.schedule import Schedule
from hkv.spec import LayerSpec


def replay_trace(
    trace: str | os.PathLike[str],
    groups: Sequence[LayerSpec] | None = None,
    num_blocks: int | Sequence[int] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    memory: int | str | None = None,
    tensor_parallel: int | None = None,
    block_size: int | None = None,
    kv_dtype: str | None = None,
    dialect: str = registry.DEFAULT,
    dialect_options: Mapping[str, object] | None = None,
    engine: str | None = None,
    check: bool = False,
    caching: bool = True,
    tokens_per_id: int | None = None,
    limit: int | None = None,
    step_ms: int = 50,
    speed: int | Fraction = 1,
    step_tokens: int | None = None,
    decode_tokens: int = Schedule.decode_tokens,
    max_running: int | None = None,
    max_model_len: int | str | None = None,
    lookahead: int = 0,
    closed_loop: int = 0,
    warmup: int | str = 0,
) -> ReplayResult:
    """Replays a request trace through a hybrid cache (`hkv replay`; `docs/replay.md` defines every number).

    Args:
      trace: path of the trace, perhaps compressed; `-` is standard input.
      groups: one spec a group, with `num_blocks`; or else `model` and `memory` say which cache it is.
      num_blocks: blocks in the pool, the null block included; in each pool, where there are several.
      model: a model's `config.json`, planned as by `plan`.
      memory: with a model: for its cache on each GPU, in bytes or as text such as `80GiB`.
      tensor_parallel: with a model: ranks that split the heads; None for 1.
      block_size: with a model: tokens per block; None for its kernels'.
      kv_dtype: with a model: element type of its cache; None for `auto`.
      dialect: name of the dialect, as headers give it.
      dialect_options: options of `hkv replay` that this dialect has and others need not, by name: `retention`, ...
      engine: name of the engine; None for the compiled one, where it has the cache's rules, else the NumPy engine.
      check: whether the NumPy engine is held against it.
      caching: whether prefixes are reused.
      tokens_per_id: tokens that one of the trace's `hash_ids` stands for; None for what the trace says, or 512.
      limit: most requests to replay; None for all.
      step_ms: milliseconds of a step.
      speed: factor by which requests arrive faster than recorded.
      step_tokens: most tokens computed in a step; None for 8,192, or as the dialect's `device` has it.
      decode_tokens: tokens that a running request generates in a step.
      max_running: most requests running at once; None for 256, or as the dialect's `device` has it.
      max_model_len: most tokens of prompt and output; `auto`, with a model, for the most that fit; None: the default.
      lookahead: slots allocated for draft tokens.
      closed_loop: requests kept in the system, whatever the time stamps; 0 to follow them.
      warmup: requests at the beginning that do not count as prompts, hits or misses, or so many percent (`50%`).

    Raises:
      HKVError: the trace, the cache, the dialect or the engine cannot be used.
      Difference: the check found one (`hkv.replay.plain`).
    """
    options = cache_options(
        {
            "groups": groups,
            "num_blocks": num_blocks,
            "model": model,
            "memory": memory,
            "tensor_parallel": tensor_parallel,
            "block_size": block_size,
            "kv_dtype": kv_dtype,
            "dialect": dialect,
            "caching": caching,
            "step_tokens": step_tokens,
            "decode_tokens": decode_tokens,
            "max_running": max_running,
            "max_model_len": max_model_len,
            "lookahead": lookahead,
            "closed_loop": closed_loop,
        },
        dialect_options or {},
    )
    studied = registry.dialect_of(dialect).replay_command().studied(options)
    name = default_engine(studied.cache)[0] if engine is None else engine
    outcome = replay(
        os.fspath(trace),
        studied.cache,
        studied.schedule,
        Timing(step_ms=step_ms, speed=Fraction(speed)),
        engine=name,
        check=check,
        tokens_per_id=tokens_per_id,
        limit=limit,
        sampled=True,
        warmup=str(warmup),
    )
    return result_of(outcome, name)


def cache_options(arguments: Mapping[str, Any], own: Mapping[str, object]) -> dict[str, Any]:
    """Arguments of `replay_trace` as a dialect's command takes them."""
    options = {"tp" if name == "tensor_parallel" else name: value for name, value in arguments.items()}
    for name, convert in _CONVERSIONS.items():
        if options[name] is not None:
            options[name] = convert(options[name])
    dialect = options["dialect"]
    rules = registry.dialect_of(dialect).replay_command()
    command = click.Command("replay", params=list(rules.options()))
    context = command.make_context("replay", [])
    known = {option.name: option for option in command.params}
    options |= context.params
    for name, value in own.items():
        if name not in known:
            raise ConfigError("dialect_options", name, f"one of {', '.join(map(str, known)) or 'none'} under {dialect}")
        options[name] = known[name].type_cast_value(context, value) if isinstance(value, str) else value
    try:
        check_cache_options(options)
    except click.UsageError as error:
        raise ConfigError("groups", options["groups"], error.format_message()) from None
    return options


_CONVERSIONS: Mapping[str, Callable[[Any], object]] = {
    "groups": list,
    "num_blocks": lambda blocks: (blocks,) if isinstance(blocks, int) else tuple(blocks),
    "model": os.fspath,
    "memory": str,
    "max_model_len": str,
}
"""Makes what the command's parsers would have made of the same words."""
