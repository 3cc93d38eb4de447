"""`hkv replay`: its options, each declared once, and the interface of a dialect to it.

The command line, `hkv.replay_trace` and `hkv.sweep` take what is declared here, and hand it to the dialect by name.
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import click

from hkv.contract import registry
from hkv.contract.options import COUNT, RANKS, TOKENS, OwnCommand, Written, option
from hkv.errors import ConfigError
from hkv.limits import (
    MAX_BLOCKS,
    MAX_COUNT,
    MAX_SPECULATIVE_TOKENS,
    MAX_SPEED,
    MAX_STEP_MS,
    parse_length,
    whole_number,
)
from hkv.model.huggingface import Model
from hkv.oracle.engines import forms
from hkv.replay.run import COMPILED, REFERENCE, ReplayedCache
from hkv.replay.schedule import Schedule
from hkv.replay.traces.interned import InternedTrace
from hkv.replay.traces.reader import TOKENS_PER_ID
from hkv.spec import LayerSpec, spec_from_text, spec_to_text, text_forms


def _blocks(text: str) -> tuple[int, ...]:
    numbers = [whole_number(part.strip()) for part in text.split(",")]
    counts = [number for number in numbers if number is not None and 2 <= number <= MAX_BLOCKS]
    if len(counts) != len(numbers):
        raise ConfigError("num-blocks", text, f"an integer from 2 to {MAX_BLOCKS}, or several between commas")
    return tuple(counts)


def _positive(text: str) -> Fraction:
    expected = f"a positive number, from 1/{MAX_SPEED} to {MAX_SPEED}"
    try:
        # Fraction would write 1e999999999 out digit by digit.
        number = Fraction(text) if re.fullmatch(r"[0-9./]{1,40}", text) else Fraction(0)
    except (ValueError, ZeroDivisionError):
        raise ConfigError("speed", text, expected) from None
    if not 1 / MAX_SPEED <= number <= MAX_SPEED:
        raise ConfigError("speed", text, expected)
    return number


def groups_text(specs: Sequence[LayerSpec]) -> str:
    """The groups as the command line takes them."""
    return ",".join(map(spec_to_text, specs))


def _groups(text: str) -> list[LayerSpec]:
    return [spec_from_text(part.strip()) for part in text.split(",")]


GROUPS = Written("groups", _groups, lambda specs: None if specs is None else groups_text(specs))
"""Layers as `hkv.spec.text_forms` says them, several of them between commas."""

BLOCKS = Written("blocks", _blocks, lambda counts: None if counts is None else ",".join(map(str, counts)))
"""A number of blocks, or several between commas."""

POSITIVE = Written("number", _positive)
"""A positive number, exactly as written: 2, 0.5, 3/2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The cache that a replay studies, and whose rules it follows."""

    groups: Sequence[LayerSpec] | None = option(
        type=GROUPS, help=f"The groups, between commas, each one of: {', '.join(text_forms())}."
    )
    num_blocks: Sequence[int] | None = option(type=BLOCKS, help="Blocks in the pool, the null block included.")
    model: str | None = option(
        metavar="CONFIG", help="Instead of --groups: a model, named and planned as by `hkv plan`."
    )
    memory: str | None = option(metavar="SIZE", help="With --model: memory for its cache on each GPU, such as 80GiB.")
    tp: int | None = option(type=RANKS, help="With --model: tensor-parallel ranks.  [default: 1]")
    block_size: int | None = option(type=TOKENS, help="With --model: tokens per block, if not its kernels'.")
    kv_dtype: str | None = option(metavar="TYPE", help="With --model: element type of its cache.  [default: auto]")
    engine: str = option(
        COMPILED,
        show_default=False,
        help=f"Whose cache, one of: {forms()}.  [default: {COMPILED}; {REFERENCE} where that has no form of the cache]",
    )
    check: bool = option(False, help="Run the NumPy engine beside it and stop at the first difference (exit 1).")
    caching: bool = option(True, "--caching/--no-caching", help="Prefix caching.")
    dialect: str = option(registry.DEFAULT, type=click.Choice(registry.names()), help="Whose rules.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """Arrivals of a trace's requests, and the scheduler that serves them."""

    tokens_per_id: int | None = option(
        type=TOKENS,
        help=f"Tokens that one of the trace's hash_ids stands for.  [default: as the trace says; {TOKENS_PER_ID}]",
    )
    limit: int | None = option(type=COUNT, help="Replay the first LIMIT requests only.")
    step_ms: int = option(50, type=click.IntRange(1, MAX_STEP_MS), help="Milliseconds of a step.")
    speed: int | Fraction = option(1, type=POSITIVE, help="Arrivals come this many times faster than recorded.")
    step_tokens: int | None = option(
        type=TOKENS, help=f"Most tokens computed in a step.  [default: {Schedule.step_tokens}, or the device's]"
    )
    decode_tokens: int = option(
        Schedule.decode_tokens, type=TOKENS, help="Tokens a running request generates in a step."
    )
    max_running: int | None = option(
        type=COUNT, help=f"Most requests running at once.  [default: {Schedule.max_running}, or the device's]"
    )
    max_model_len: str | None = option(
        metavar="N",
        help="Most tokens of prompt and output; longer requests are refused. With --model, `auto` is the most that "
        f"fit.  [default: {Schedule.max_model_len}; with --model, the model's]",
    )
    lookahead: int = option(0, type=click.IntRange(0, MAX_SPECULATIVE_TOKENS), help="Slots allocated for draft tokens.")
    closed_loop: int = option(
        0,
        type=click.IntRange(0, MAX_COUNT),
        help="Keep N requests in the system, whatever the time stamps; 0: off.",
    )
    warmup: int | str = option(
        0,
        type=click.STRING,
        metavar="N|P%",
        help="The first N requests, or P percent of them, do not count as prompts, hits or misses.",
    )


FOR_GROUPS = ("num_blocks",)
FOR_MODELS = ("memory", "tp", "block_size", "kv_dtype")


@dataclasses.dataclass(frozen=True)
class StudiedCache:
    """The cache of a replay, and what the command says about it.

    Attributes:
      schedule: the numbers that steer the replay; its longest request is the cache's.
      name: names the cache in a plot's title.
      remark: one line on the plan it comes from, or "".
      resolved: one line on what options came to be, but for the size of the pool, in the engine's words; or "".
    """

    cache: ReplayedCache
    schedule: Schedule
    name: str
    remark: str = ""
    resolved: str = ""

    def warnings(self, trace: InternedTrace) -> Sequence[str]:
        """Sentences on what the trace is about to run into: its prompts that are not refused, that is."""
        most, ids = self.schedule.max_model_len, max((each.tokens_per_id for each in trace.requests), default=0)
        hybrid = any(not group.spec.reads_all for group in self.cache.groups)
        served = (each.input_length for each in trace.requests if each.input_length + each.output_length <= most)
        found = list(self.cache.warnings(max(served, default=1)))
        if hybrid and self.cache.reuses and ids > (block := self.cache.hit_units.unit):
            found.append(
                f"ids of {ids:,} tokens, and hits at multiples of {block:,}: what is kept before other lengths than an "
                "id's, of windows and states, is never hit; an engine may hit far more (ids of "
                f"{block:,} tokens or less say)"
            )
        return found


class ReplayCommand(OwnCommand, abc.ABC):
    """`hkv replay` under one dialect's rules."""

    @abc.abstractmethod
    def of_groups(self, options: dict[str, Any]) -> StudiedCache:
        """The cache of `options["groups"]`, a list of `hkv.spec.LayerSpec`, and `options["num_blocks"]`, a tuple."""

    def of_model(self, options: dict[str, Any]) -> StudiedCache:
        """The cache of a model, `options["model"]`, in `options["memory"]`."""
        raise ConfigError("model", options["model"], f"--groups: {options['dialect']} plans no models")

    def studied(self, options: dict[str, Any]) -> StudiedCache:
        """The cache that the command's options ask for."""
        return self.of_model(options) if check_cache_options(options) else self.of_groups(options)


def check_cache_options(options: dict[str, Any]) -> bool:
    """True if the cache is given by a model, False if by groups."""
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


def schedule_for_groups(options: dict[str, Any]) -> Schedule:
    """The schedule's numbers, where no model says how long a request may be."""
    length = parse_length(options["max_model_len"])
    if length == 0:
        raise ConfigError("max_model_len", "auto", "a number of tokens; auto is for --model")
    return schedule_of(options, Schedule.max_model_len if length is None else length)


def schedule_of(options: dict[str, Any], max_model_len: int) -> Schedule:
    """The schedule's numbers; those that are None are as always."""
    names = ("step_tokens", "decode_tokens", "max_running", "lookahead", "closed_loop")
    given = {name: options[name] for name in names if options[name] is not None}
    return Schedule(max_model_len=max_model_len, **given)


def model_name(config: str, model: Model) -> str:
    """Name of a model, and its type: that of the folder its config.json is in, or of another file."""
    path = pathlib.Path(config).resolve()
    name = path.parent.name if path.name == "config.json" else path.name.removesuffix(".json")
    return name if name == model.model_type else f"{name} ({model.model_type})"
