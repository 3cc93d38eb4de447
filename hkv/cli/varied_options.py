"""Options of `hkv replay` with several values: the words of a command line, and the replays that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import click

from hkv.cli import replay as single
from hkv.cli.options import is_given
from hkv.contract import registry
from hkv.replay import sweep
from hkv.replay.command import ReplayCommand
from hkv.replay.points import Point

NOT_VARIED = ("--json", "--plot", "--check", "--ceilings")
"""Options of `hkv replay` that say nothing to several of them."""


@dataclasses.dataclass(frozen=True)
class Words:
    """A command line taken apart: what is no option, options of a size or of several values, and the others."""

    files: Sequence[str]
    axes: Mapping[str, Sequence[str]]
    fixed: Sequence[tuple[str, ...]]


def parsed(words: Sequence[str]) -> Words:
    """Takes a command line apart; UsageError for what is no option of `hkv replay`, or says nothing here."""
    known = {name: each for each in single.command.params for name in (*each.opts, *each.secondary_opts)}
    varied = {*sweep.SPLIT, *_names(*single.COMMANDS)}
    axes: dict[str, list[str]] = {}
    files: list[str] = []
    fixed: list[tuple[str, ...]] = []
    left = iter(words)
    for word in left:
        option, equals, text = word.partition("=")
        if not word.startswith("-") or word == "-":
            files.append(word)
            continue
        found = known.get(option)
        if found is None or option in NOT_VARIED:
            raise click.UsageError(f"{option}: no option of this command, or of hkv replay that it takes")
        if not isinstance(found, click.Option) or found.is_flag:
            fixed.append((word,))
            continue
        if not equals:
            text = next(left, "")
        option = next((name for name in found.opts if name in varied), option)
        several = sweep.values(option, text) if option in varied else [text]
        if len(several) > 1 or option in (sweep.MEMORY, sweep.BLOCKS):
            axes[option] = several
        else:
            fixed.append((option, text))
    return Words(files, axes, fixed)


def arguments_of(words: Words, labels: Mapping[str, str]) -> list[str]:
    """The arguments of one of the replays."""
    given = [*words.fixed, *labels.items()]
    return [*words.files[:1], *(word for each in given if _concerns(each[0], words, labels) for word in each)]


def _concerns(option: str, words: Words, labels: Mapping[str, str]) -> bool:
    """False, where dialects are held against each other, for an option that only others than this replay's have."""
    if len(words.axes.get("--dialect", ())) < 2 or option not in _names(*single.COMMANDS):
        return True
    return option in _names(registry.dialect_of(labels["--dialect"]).replay_command())


def _names(*commands: ReplayCommand) -> set[str]:
    """Options that dialects add to `hkv replay`."""
    return {name for command in commands for option in command.options() for name in option.opts}


def points_of(words: Words) -> list[Point]:
    """The replays that a command line asks for, each looked at and known to be no error.

    Raises:
      click.UsageError: one has options that do not go together.
      HKVError: one has no cache.
    """
    asked = [
        {option: text for option, text in labels.items() if _concerns(option, words, labels)}
        for labels in sweep.points(words.axes)
    ]
    points: list[Point] = []
    for labels in (each for place, each in enumerate(asked) if each not in asked[:place]):
        with single.command.make_context("replay", arguments_of(words, labels)) as context:
            options: dict[str, Any] = context.params
            single.prepared(options)
            engine = options["engine"] if is_given("engine") else None
            timing, warmup = single.timing_of(options), options["warmup"]
            points.append(Point(labels=labels, options=options, timing=timing, engine=engine, warmup=warmup))
    return points
