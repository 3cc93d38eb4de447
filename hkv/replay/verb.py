"""Replaying a trace, sweeping options, and comparing replays: `hkv replay`, `sweep` and `compare` as functions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import click
import numpy as np
import numpy.typing as npt

from hkv.columns import Columns
from hkv.contract import registry
from hkv.errors import ConfigError
from hkv.replay import sweep as options_of_sweeps
from hkv.replay.command import CacheOptions, ScheduleOptions, check_cache_options
from hkv.replay.compare import CompareResult, compared, read_side
from hkv.replay.result import ReplayResult, result_of
from hkv.replay.run import Timing, default_engine, replay
from hkv.replay.swept import Point, answers, swept
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import read_trace
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
    dialect: str = CacheOptions.dialect,
    dialect_options: Mapping[str, object] | None = None,
    engine: str | None = None,
    check: bool = CacheOptions.check,
    caching: bool = CacheOptions.caching,
    tokens_per_id: int | None = None,
    limit: int | None = None,
    step_ms: int = ScheduleOptions.step_ms,
    speed: int | Fraction = ScheduleOptions.speed,
    step_tokens: int | None = None,
    decode_tokens: int = ScheduleOptions.decode_tokens,
    max_running: int | None = None,
    max_model_len: int | str | None = None,
    lookahead: int = ScheduleOptions.lookahead,
    closed_loop: int = ScheduleOptions.closed_loop,
    warmup: int | str = ScheduleOptions.warmup,
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
      Difference: the check found one (`hkv.replay.agreement`).
    """
    timing = Timing(step_ms=step_ms, speed=Fraction(speed))
    options = cache_options(
        timing,
        groups=groups,
        num_blocks=num_blocks,
        model=model,
        memory=memory,
        tp=tensor_parallel,
        block_size=block_size,
        kv_dtype=kv_dtype,
        dialect=dialect,
        caching=caching,
        step_tokens=step_tokens,
        decode_tokens=decode_tokens,
        max_running=max_running,
        max_model_len=max_model_len,
        lookahead=lookahead,
        closed_loop=closed_loop,
        **dialect_options or {},
    )
    studied = registry.dialect_of(dialect).replay_command().studied(options)
    name = default_engine(studied.cache)[0] if engine is None else engine
    outcome = replay(
        os.fspath(trace),
        studied.cache,
        studied.schedule,
        timing,
        engine=name,
        check=check,
        tokens_per_id=tokens_per_id,
        limit=limit,
        sampled=True,
        warmup=str(warmup),
    )
    return result_of(outcome, name)


def cache_options(timing: Timing | None = None, /, **given: Any) -> dict[str, Any]:
    """Options of a replay by name, all of them, as a dialect's command takes them.

    Those that are not given have the command's defaults, those of the dialect that `given` names included. `timing`
    says how long a step is, which a cache that moves bytes asks.

    Raises:
      ConfigError: the dialect has no such option, or it is not for that dialect.
    """
    options: dict[str, Any] = {name: given.get(name, default) for name, default in DEFAULTS.items()}
    for name, convert in _CONVERSIONS.items():
        if options[name] is not None:
            options[name] = convert(options[name])
    dialect = options["dialect"]
    command = click.Command("replay", params=[*registry.dialect_of(dialect).replay_command().options()])
    context = command.make_context("replay", [])
    known = {option.name: option for option in command.params}
    options |= {**context.params, "step_ms": (timing or Timing()).step_ms}
    for name in given.keys() - DEFAULTS.keys():
        if name not in known:
            raise ConfigError("dialect_options", name, f"one of {', '.join(map(str, known)) or 'none'} under {dialect}")
        options[name] = _cast(name, known[name], given[name], context)
    try:
        check_cache_options(options)
    except click.UsageError as error:
        raise ConfigError("groups", options["groups"], error.format_message()) from None
    return options


def _cast(name: str, option: click.Parameter, value: Any, context: click.Context) -> Any:
    """A dialect's option as its command reads it, from its text or from a number or switch of Python's."""
    switch = isinstance(option.type, click.types.BoolParamType)
    try:
        if value is not None and (isinstance(value, bool) != switch or not isinstance(value, str | int | float)):
            raise click.BadParameter(f"{type(value).__name__} is none")
        return value if value is None or switch else option.type_cast_value(context, str(value))
    except click.UsageError as error:
        raise ConfigError(name, value, f"what --{name.replace('_', '-')} takes ({error.message})") from None


_OF_THE_TRACE = ("engine", "check", "tokens_per_id", "limit", "step_ms", "speed", "warmup")

DEFAULTS: Mapping[str, Any] = {
    field.name: field.default
    for declared in (CacheOptions, ScheduleOptions)
    for field in dataclasses.fields(declared)
    if field.name not in _OF_THE_TRACE
}
"""Options about the cache and its schedule that all dialects have, with their defaults."""

_CONVERSIONS: Mapping[str, Callable[[Any], object]] = {
    "groups": list,
    "num_blocks": lambda blocks: (blocks,) if isinstance(blocks, int) else tuple(blocks),
    "model": os.fspath,
    "memory": str,
    "max_model_len": str,
}
"""Makes what the command's parsers would have made of the same words."""


SIZES = {
    "memory": options_of_sweeps.MEMORY,
    "num_blocks": options_of_sweeps.BLOCKS,
    "offload": options_of_sweeps.TIER,
}


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """Result of a sweep.

    Attributes:
      points: one entry a replay: what varies, by name, as text; `line`, what is equal on one line, all that varies but
        the size (of the second tier, where that of the pool does not vary); the totals `hkv.replay.sweep.COLUMNS` (-1
        where the engine does not count); and, with bounds, `optimal_tokens`, hit tokens that no choice of evictions
        exceeds.
      lines: one entry a line: `line`; `highest`, its best hit rate; `knee`, the size at which the gain bends, or "";
        and, with bounds, `infinite`, the hit rate in a pool that evicts nothing (NaN where nothing is reused).
    """

    points: Columns
    lines: Columns


def sweep(
    trace: str | os.PathLike[str],
    vary: Mapping[str, Sequence[object]],
    options: Mapping[str, object] | None = None,
    *,
    engine: str | None = None,
    tokens_per_id: int | None = None,
    limit: int | None = None,
    step_ms: int = ScheduleOptions.step_ms,
    speed: int | Fraction = ScheduleOptions.speed,
    warmup: int | str = ScheduleOptions.warmup,
    jobs: int = 1,
    bounds: bool = False,
    results: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Replays a trace with every combination of values (`hkv sweep`).

    Args:
      trace: path of the trace, perhaps compressed; `-` is standard input.
      vary: values by name: arguments of `replay_trace`, or options of the dialect (`retention`, ...). One of them is
        `memory`, `num_blocks` or `offload`.
      options: the same with one value each.
      engine: name of the engine; None for the compiled one, where it has the cache's rules, else the NumPy engine.
      tokens_per_id: as in `replay_trace`.
      limit: as in `replay_trace`.
      step_ms: as in `replay_trace`.
      speed: as in `replay_trace`.
      warmup: as in `replay_trace`.
      jobs: points replayed at once, by the compiled engine in threads; by others in processes, for which a script needs
        the guard `if __name__ == "__main__"`.
      bounds: whether to find what a pool that evicts nothing hits, and the most that any choice of what to keep could.
      results: path of a file of JSON lines, one a point; points that stand there are not replayed again.

    Raises:
      HKVError: the trace, a cache, a dialect or the engine cannot be used, or an option is not known.
    """
    if not SIZES.keys() & vary.keys():
        raise ConfigError("vary", sorted(vary), "values of memory, num_blocks or offload among them")
    timing = Timing(step_ms=step_ms, speed=Fraction(speed))
    told = options_of_sweeps.told_apart({SIZES.get(name, name): values for name, values in vary.items()})
    points = [
        Point(
            labels={name: text for name, text in _labels(values).items() if name in told},
            options=_options(timing, {**(options or {}), **values}),
            timing=timing,
            engine=engine,
            warmup=str(warmup),
        )
        for values in _combinations(vary)
    ]
    interned = InternedTrace(read_trace(os.fspath(trace), tokens_per_id, limit))
    path = None if results is None else os.fspath(results)
    rows, infinite = swept(points, interned, jobs=jobs, with_bounds=bounds, results=path)
    return _result(rows, answers(rows, infinite), bounds)


def compare(replays: Mapping[str, ReplayResult | str | os.PathLike[str]]) -> CompareResult:
    """Holds replays of one trace against the first of them (`hkv compare`).

    Args:
      replays: by name, results of `replay_trace`, or paths of what `hkv replay --json` wrote.

    Raises:
      HKVError: fewer than two, a file that is none, or replays of different requests.
    """
    return compared(
        [(name, each if isinstance(each, ReplayResult) else read_side(each)[1]) for name, each in replays.items()]
    )


def _combinations(vary: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Every combination of values, by the same rule as the command's."""
    places = {name: [str(place) for place in range(len(values))] for name, values in vary.items()}
    return [{name: vary[name][int(place)] for name, place in each.items()} for each in options_of_sweeps.points(places)]


def _labels(values: Mapping[str, object]) -> dict[str, str]:
    return {SIZES.get(name, name): _text(value) for name, value in values.items()}


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_text(each) for each in cast("Sequence[object]", value))
    return str(getattr(value, "to_text", lambda: value)())


def _options(timing: Timing, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Arguments of `replay_trace`, by its names, as a dialect's command takes them."""
    named = {"tp" if name == "tensor_parallel" else name: each for name, each in arguments.items()}
    return cache_options(timing, **named)


def _result(rows: Sequence[options_of_sweeps.Row], found: Sequence[Mapping[str, Any]], bounds: bool) -> SweepResult:
    names = {option: name for name, option in SIZES.items()}
    labels: list[str] = list(rows[0]["options"])
    totals = [*options_of_sweeps.COLUMNS, *([options_of_sweeps.OPTIMAL] if bounds else ())]
    totals += [name for name in options_of_sweeps.TIERED if all(name in row for row in rows)]
    points: dict[str, npt.NDArray[Any]] = {
        **{names.get(name, name): np.array([row["options"][name] for row in rows], str) for name in labels},
        "line": np.array([options_of_sweeps.line_of(row["options"]) for row in rows], str),
        **{name: np.array([-1 if row[name] is None else row[name] for row in rows]) for name in totals},
    }
    lines: dict[str, npt.NDArray[Any]] = {
        "line": np.array([each["line"] for each in found], str),
        "highest": np.array([each["highest"]["hit_rate"] for each in found], float),
        "knee": np.array([_size(each["knee"]) for each in found], str),
    }
    if bounds:
        rates = [each["infinite"]["hit_rate"] if each["infinite"] else np.nan for each in found]
        lines["infinite"] = np.array(rates, float)
    return SweepResult(points, lines)


def _size(row: options_of_sweeps.Row | None) -> str:
    """The size of a point's pool as text; "" for none."""
    return "" if row is None else next(str(row["options"][size]) for size in SIZES.values() if size in row["options"])
