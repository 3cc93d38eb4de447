"""Interface of a dialect to `hkv replay`: its own options, and the cache that they and the common ones ask for."""

from __future__ import annotations

import abc
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import click

from hkv.errors import ConfigError
from hkv.model.huggingface import Model
from hkv.replay.run import ReplayedCache
from hkv.replay.schedule import Schedule
from hkv.request_length import parse_length

FOR_GROUPS = ("num_blocks",)
FOR_MODELS = ("memory", "tp", "block_size", "kv_dtype")


@dataclasses.dataclass(frozen=True)
class StudiedCache:
    """The cache of a replay, and what the command says about it.

    Attributes:
      cache: the cache.
      schedule: the numbers that steer the replay; its longest request is the cache's.
      name: names the cache in a plot's title.
      remark: one line on the plan it comes from, or "".
      resolved: one line on what options came to be, but for the size of the pool, in the engine's words; "" where the
        dialect does not tell.
    """

    cache: ReplayedCache
    schedule: Schedule
    name: str
    remark: str = ""
    resolved: str = ""


class ReplayCommand(abc.ABC):
    """`hkv replay` under one dialect's rules."""

    def options(self) -> Sequence[click.Option]:
        """Options that only some dialects have, this one among them. Their defaults stand for not being given."""
        return ()

    def written(self, options: dict[str, Any]) -> dict[str, Any]:
        """Values of its own options as the command line would take them, those left out that are so already."""
        return {}

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


def groups_text(options: dict[str, Any]) -> str:
    """The groups as the command line takes them."""
    return ",".join(spec.to_text() for spec in options["groups"])
