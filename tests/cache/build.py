"""Small caches for tests, all of which share their buckets, and the copies in what is compiled."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import numpy as np

from hkv.dialects.vllm import machine as cache
from hkv.dialects.vllm.config import VllmConfig
from hkv.dialects.vllm.rules.operations import Batch, Code, Column, Results
from hkv.dialects.vllm.rules.parameters import Parameters
from hkv.machine.operations import Operations
from hkv.model.topology import Topology
from hkv.spec import FullAttention, LayerSpec, Mamba, SlidingWindow
from hkv.state.state import Buckets, State

BUCKETS = Buckets(blocks=256, requests=8, groups=4, row=32, chain=64, keys=256, parts=3)
"""Sizes that all of these tests use; only a state's pool is as large as `LARGE`."""

LARGE = 200
"""Elements from which on an array counts as one of a state's."""

GROUPS: tuple[LayerSpec, ...] = (
    FullAttention(block_size=8),
    SlidingWindow(block_size=4, window=9),
    Mamba(block_size=8),
)


def config(*specs: LayerSpec, num_blocks: int = 40, **changes: Any) -> VllmConfig:
    """A configuration with hash blocks of 4 tokens."""
    specs = specs or GROUPS
    sizes = [spec.block_size for spec in specs]
    fields: dict[str, Any] = {
        "hash_block_size": sizes[0] if len(sizes) == 1 else 4,
        "scheduler_block_size": max(sizes),
        "max_model_len": 100,
    }
    return VllmConfig(topology=Topology.of_specs(specs), num_blocks=num_blocks, **{**fields, **changes})


def start(settings: VllmConfig | None = None) -> tuple[Parameters, State]:
    """An empty cache on the device."""
    return jax.device_put(cache.init(settings or config(), BUCKETS))


def operations(batch: Batch) -> Operations:
    """Operations, of one size for all tests."""
    return batch.build(64, 256)


@functools.cache
def program(lanes: int = 0) -> Any:
    """The program that all tests share, compiled once; for stacked states if there are lanes."""
    arguments = (*cache.init(config(), BUCKETS), operations(Batch().add(Code.FREE, 0)))
    function = cache.pure(ids=256, events=256)
    if lanes:
        arguments = jax.tree.map(lambda x: np.stack([x] * lanes), arguments)
        function = jax.vmap(function)
    return jax.jit(function, donate_argnums=(1,)).lower(*arguments).compile()


def run(parameters: Parameters, state: State, batch: Batch) -> tuple[State, Results]:
    """Performs a batch with the program that all tests share."""
    new, results = program()(parameters, state, operations(batch))
    return new, jax.device_get(results)


def prompt(batch: Batch, slot: int, keys: range, tokens: int | None = None, **arguments: int) -> Batch:
    """A request arrives, is looked up, and gets blocks for all of its prompt, which is computed then."""
    tokens = 4 * len(keys) if tokens is None else tokens
    batch.add(Code.REQUEST, slot, keys, tokens=tokens).add(Code.LOOKUP, slot)
    return batch.add(Code.ALLOCATE, slot, new=-1, hit=-1, shared_prefix=-1, advance=1, **arguments)


def statuses(results: Results, batch: Batch) -> list[int]:
    """The status of each operation."""
    return np.asarray(results.table)[: len(batch), Column.STATUS].tolist()


INSTRUCTION = re.compile(r"= \w+\[([\d,]+)\]\S* (copy|copy-start|select|transpose|gather|scatter|concatenate|pad)\(")


def large_copies(text: str, least: int) -> list[str]:
    """Instructions that copy, or rebuild, at least `least` elements."""
    found = []
    for line in text.splitlines():
        match = INSTRUCTION.search(line)
        if match and math.prod(int(size) for size in match[1].split(",")) >= least:
            found.append(line.strip())
    return found
