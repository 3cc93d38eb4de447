"""Interface of a dialect to `hkv plan`: its own options, and the plan that they and the common ones ask for."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hkv.contract.options import OneOrMore, OwnCommand, option
from hkv.errors import UnsupportedConfigError
from hkv.limits import show_bytes
from hkv.model.huggingface import Model
from hkv.spec import bounded_bytes


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """A plan of a model's cache: all of it as plain values, and a function that prints it for people."""

    report: dict[str, Any]
    show: Callable[[Console], None]


class PlanCommand(OwnCommand, abc.ABC):
    """`hkv plan` under one dialect's rules."""

    @abc.abstractmethod
    def plan(self, memory: int | None, options: dict[str, Any]) -> ModelPlan:
        """The plan of `options["config"]`.

        Args:
          memory: bytes for the cache on each GPU, or None if it was not given.
          options: the command's, by name; `bugs` as the set that was named.

        Raises:
          HKVError: the options, the model or the memory cannot be used.
        """

    def capacity(self, memory: int | None, options: dict[str, Any]) -> Capacity:
        """The row of `options["config"]` in a table of several models or options.

        Args:
          memory: bytes for the cache on each GPU, or None if it was not given.
          options: the command's, by name; `bugs` as the set that was named.

        Raises:
          UnsupportedConfigError: the dialect's plan does not say how many requests fit.
          HKVError: the options, the model or the memory cannot be used.
        """
        expected = "one model and one value of each option with this dialect, whose plan has no concurrency"
        raise UnsupportedConfigError("table, --csv or --plot", options["config"], expected)

    replays_workloads: ClassVar[bool] = False
    """True if a replay can run on the planned cache, steps and requests at once: the plan says all of them."""

    of_one_plan: ClassVar[tuple[str, ...]] = ()
    """Names of options that say nothing in a table of several plans, nor of a workload."""

    def serve_line(self, options: dict[str, Any], engines: int) -> str:
        """The command that starts so many engines of `options["config"]`; empty of a dialect that has none."""
        return ""


def length_option() -> Any:
    """A field for `--max-model-len`, of dialects that say how many requests fit."""
    said = "Tokens of the longest request, 32k and 32K as vLLM reads them; `auto` for the longest that fits."
    return option(None, "--max-model-len", type=OneOrMore(click.STRING), metavar="N,...", help=said)


def sequence_bytes(model: Model, tokens: int) -> int:
    """Bytes that a sequence of so many tokens holds in all, on one GPU, for windows, chunks and states.

    A window counts its tokens, without rounding to blocks, and no more than the sequence has; a chunk its longest.
    """
    return sum(bounded_bytes(spec, tokens) for spec in model.specs.values())


def model_record(model: Model, tokens: int | None = None) -> dict[str, Any]:
    """Facts of a model's cache, as plain values.

    Args:
      model: the model.
      tokens: of the longest request; None for the model's.
    """
    return {
        "model_type": model.model_type,
        "num_layers": model.num_layers,
        "max_model_len": model.max_model_len,
        "tensor_parallel": model.tensor_parallel,
        "token_bytes_if_all_full": model.full_token_bytes,
        "token_bytes": float(model.token_bytes),
        "sequence_bytes": sequence_bytes(model, tokens or model.max_model_len),
        "notes": list(model.notes),
    }


def print_facts(console: Console, report: dict[str, Any], facts: Sequence[tuple[str, str]]) -> None:
    """Prints what a model caches, by its `model_record`, then more facts: name and text."""
    model = report["model"]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("model", f"{model['model_type']}, {model['num_layers']} layers")
    token, full = show_bytes(model["token_bytes"]), show_bytes(model["token_bytes_if_all_full"])
    table.add_row("a token", f"{token}; {full} with full attention throughout")
    table.add_row(
        "a sequence", f"{show_bytes(model['sequence_bytes'])} of windows, states and encodings beside its tokens"
    )
    for name, text in facts:
        table.add_row(name, text)
    for number, note in enumerate(model["notes"]):
        table.add_row("" if number else "defaults", note)
    console.print(table, highlight=False)
    console.print()


def plan_table(title: str) -> Table:
    """An empty table in the style of plans."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


# Capacity of a planned cache: one row of the table that `hkv plan` makes of several models or options.


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Requests and tokens that fit into a planned cache. Sizes in bytes, on one GPU.

    Attributes:
      max_model_len: tokens of the longest request that the plan is for.
      token_bytes: bytes that one more token of a sequence adds for good, all layers together.
      sequence_bytes: bytes that a sequence of the longest length holds besides, for windows, chunks and states.
      num_blocks: blocks in the pool, those that the engine keeps for itself included.
      tokens: tokens that the engine says its cache holds.
      concurrency: requests of the longest length that the engine says fit; None for a model that caches nothing.
      requests: requests of the longest length that fit when they run through the pool.
      limiting: kind of layers that hold most of a request's blocks; empty for a model that caches nothing.
      limiting_share: their share of the request's blocks.
      limited_by: what keeps the next request out, in words.
      weights: bytes of weights on a GPU, or None where the memory for the cache was given itself.
      memory: bytes for the cache on a GPU, or None where the engine's plan does not say.
      waste: share of a longest request's blocks that holds no layer's bytes: padding, and room up to the widest group.
      not_started: why the engine does not start so, and options with which it does; None where it starts.
    """

    max_model_len: int
    token_bytes: float
    sequence_bytes: int
    num_blocks: int
    tokens: int
    concurrency: float | None
    requests: int
    limiting: str
    limiting_share: float
    limited_by: str
    waste: float
    weights: int | None = None
    memory: int | None = None
    not_started: str | None = None
