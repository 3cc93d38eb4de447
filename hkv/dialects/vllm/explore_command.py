"""`hkv explore` under vLLM 0.33's rules."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import click

from hkv.contract.answer import EngineFactory
from hkv.contract.explore_command import ExploreCommand, Progress, Report, Search, SizeOptions, space_of
from hkv.contract.options import option
from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.engines.jax import JaxEngine
from hkv.dialects.vllm.explorer import MOVES, Space, explore
from hkv.dialects.vllm.explorer.search import CHUNK
from hkv.dialects.vllm.explorer.transition import FORMS, default_form
from hkv.dialects.vllm.replay_command import EAGLE, RETENTION
from hkv.errors import ConfigError
from hkv.limits import MAX_LANES, MAX_WORKERS
from hkv.model.topology import Topology
from hkv.spec import LayerSpec
from hkv.testing.planting import Patch, applied

RULES = "hkv.dialects.vllm."
QUEUE = "hkv.state.free_queue:"

DEFECTS = MappingProxyType(
    {
        "window-one-short": Patch(
            f"{RULES}kinds.sliding_window:parameters",
            '"LOOKBACK": kept,',
            '"LOOKBACK": kept - 1,',
        ),
        "window-run-too-long": Patch(
            f"{RULES}rules.hit:_search",
            "jnp.maximum(query.need, 0) + drop, 1)",
            "jnp.maximum(query.need, 0) + 1, 1)",
        ),
        "hit-of-everything": Patch(
            f"{RULES}rules.hit:longest_hit", "jnp.maximum(tokens - 1, 0)", "jnp.maximum(tokens, 0)"
        ),
        "room-not-counted": Patch(
            f"{RULES}rules.admit:fits",
            "(total.estimate <= limit) & (demand.capped | (total.checked <= w.free))",
            "total.estimate <= limit + 1",
        ),
        "shared-block-freed": Patch(f"{QUEUE}release", "(references == -1)", "(references <= -1)"),
        "cached-blocks-first": Patch(
            f"{QUEUE}release", 'w.read("keys", w.key(block)) != 0', 'w.read("keys", w.key(block)) == 0'
        ),
        "adopted-block-stays-queued": Patch(
            f"{QUEUE}adopt", "jnp.where(queued, w.place(place - 1), w.queue.shape[0] - 1)", "w.queue.shape[0] - 1"
        ),
    }
)
"""Every defect, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmOptions(SizeOptions):
    """The size of a space, what is left out of it, and how it is searched."""

    eagle: Sequence[int] | None = option(type=EAGLE, help="EAGLE drop rule, for these groups.")
    retention: int | None = option(
        "dense", type=RETENTION, show_default=False, help="Tokens between retained boundaries; 0: none."
    )
    without: Sequence[str] = option((), type=click.Choice(tuple(MOVES)), help="Leave these operations out; repeatable.")
    plant: str | None = option(type=click.Choice(tuple(DEFECTS)), help="Plant this defect in the compiled cache first.")
    form: str | None = option(type=click.Choice(FORMS), help="How states are stepped together.  [default: by backend]")
    chunk: int = option(CHUNK, type=click.IntRange(1, MAX_LANES), help="States stepped at once.")
    workers: int = option(2, type=click.IntRange(1, MAX_WORKERS), help="Dispatches at the same time.")


class VllmExploreCommand(ExploreCommand):
    """The compiled cache, with every judge of `hkv.dialects.vllm.explorer.judges`."""

    declared = VllmOptions

    def search(self, options: dict[str, Any]) -> VllmSearch:
        return VllmSearch(options)


class VllmSearch(Search):
    """Goes breadth-first through a space.

    Args:
      options: the command's.

    Raises:
      HKVError: there is no such space.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._space = _space(options)
        self._form = options["form"] or default_form()
        self.more = {"form": self._form}
        self._plant = options["plant"]
        self._how = {name: options[name] for name in ("chunk", "workers", "limit_states", "seconds")}
        self.report = Report()

    def run(self, progress: Progress) -> None:
        def told(report: Report, depth: int, share: float) -> None:
            rate = f"{report.rate(report.states):,.0f} states/s"
            progress(f"depth {depth}: {report.states:,} states, {report.transitions:,} transitions, {rate}", share)

        with planted(self._plant):
            explore(self._space, form=self._form, progress=told, report=self.report, **self._how)

    @contextlib.contextmanager
    def explored(self) -> Iterator[tuple[str, EngineFactory]]:
        with planted(self._plant):
            yield ("jax" if self._plant is None else f"jax with {self._plant}"), JaxEngine


def _space(options: dict[str, Any]) -> Space:
    specs: list[LayerSpec] = options["groups"]
    sizes = [spec.block_size for spec in specs]
    cacheable = [spec.block_size for spec in specs if spec.prefix_cacheable]
    if not cacheable:
        raise ConfigError("groups", specs[0].kind, "at least one kind of layer whose blocks can be cached")
    eagle = options["eagle"]
    config = VllmConfig(
        topology=Topology.of_specs(specs, eagle or ()),
        num_blocks=options["num_blocks"],
        dialect=options["dialect"],
        hash_block_size=math.gcd(*cacheable),
        scheduler_block_size=math.lcm(*sizes),
        max_model_len=options["max_model_len"],
        eagle=eagle is not None,
        retention_interval=options["retention"],
        watermark=options["watermark"],
    )
    traffic, without = space_of(options), frozenset(options["without"])
    return Space(config=config, requests=traffic.requests, prompt=traffic.prompt, without=without)


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Lets the compiled rules have a defect until the block ends; None for none.

    Programs compiled before are forgotten on both ends.

    Raises:
      KeyError: there is no such defect.
    """
    if name is None:
        yield
        return
    with applied(DEFECTS[name]):
        cache.forget_programs()
        try:
            yield
        finally:
            cache.forget_programs()
