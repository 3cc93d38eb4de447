"""Speed at which a million states are explored: the figures of `docs/explore.md`.

python benchmarks/explore.py            # the default space of `hkv explore`; fails if it does not show what it must
"""

from __future__ import annotations

import math
import os

import click

from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.explorer import Report, Space, explore
from hkv.dialects.vllm.explorer.transition import default_form
from hkv.machine import native_loops
from hkv.model.topology import Topology
from hkv.spec import spec_from_text

STATES, SHARE = 1_000_000, 0.10
"""Least number of distinct states, and least share of evictions and of refusals among the space's transitions."""


@click.command()
@click.option("--groups", default="full:1,swa:1:2", show_default=True, help="The groups.")
@click.option("--num-blocks", default=5, show_default=True, help="Blocks, the null block included.")
@click.option("--max-model-len", default=3, show_default=True, help="Tokens of the longest request.")
@click.option("--seconds", default=600.0, show_default=True, help="In which it must be done, compiling left out.")
@click.option("--workers", default=2, show_default=True, help="Dispatches at the same time.")
def main(groups: str, num_blocks: int, max_model_len: int, seconds: float, workers: int) -> None:
    """Exhausts a space and says how fast."""
    specs = [spec_from_text(group) for group in groups.split(",")]
    sizes = [spec.block_size for spec in specs]
    config = VllmConfig(
        topology=Topology.of_specs(specs),
        num_blocks=num_blocks,
        hash_block_size=math.gcd(*sizes),
        scheduler_block_size=math.lcm(*sizes),
        max_model_len=max_model_len,
    )
    space, load = Space(config=config, prompt=max_model_len), os.getloadavg()[0]
    report = explore(space, form=default_form(), workers=workers, seconds=seconds)
    click.echo(f"{groups}, {num_blocks} blocks, requests of {max_model_len}; load {load:.1f} before")
    click.echo(f"{report.states:,} states, {report.transitions:,} transitions, depth {report.depth}")
    click.echo(f"{report.share(report.evictions):.1%} evict, {report.share(report.refusals):.1%} refuse")
    click.echo(
        f"{report.seconds:.1f} s after {report.compiling:.1f} s of compiling: {report.states / report.seconds:,.0f} "
        f"states/s, {report.transitions / report.seconds:,.0f} transitions/s"
    )
    check(report)


def check(report: Report) -> None:
    """Asserts what the figures must show."""
    assert report.counterexample is None
    assert report.exhausted
    assert report.states >= STATES
    assert min(report.share(report.evictions), report.share(report.refusals)) >= SHARE


if __name__ == "__main__":
    native_loops.enable()
    main()
