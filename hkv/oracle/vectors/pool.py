"""Vectors of the pool: sequences of what can be done to blocks, with the queue after each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from reference.state.events import Removed
from reference.state.pool import Pool

SEEDS = 24
LENGTH = 20


def cases() -> Iterator[dict[str, Any]]:
    """Random sequences on small pools. A key is a word; group 0 throughout."""
    for seed in range(SEEDS):
        draw = random.Random(seed)
        num_blocks = draw.randint(3, 9)
        pool, steps = Pool(num_blocks), []
        for _ in range(LENGTH):
            operation = _draw(draw, pool)
            taken = _perform(pool, operation)
            lost = [event.chain for event in pool.events if isinstance(event, Removed)]
            pool.events.clear()
            steps.append(
                {
                    "operation": operation,
                    "blocks": taken,
                    "lost_keys": sorted(map(str, lost)),
                    "free": list(pool.free),
                    "refs": list(pool.refs),
                    "keys": {
                        str(block): sorted(str(key[1]) for key in pool.keys_of(block))
                        for block in range(num_blocks)
                        if pool.keys_of(block)
                    },
                }
            )
        yield {
            "name": f"seed {seed}",
            "input": {"num_blocks": num_blocks, "operations": [step["operation"] for step in steps]},
            "expected": {"after": [{key: step[key] for key in step if key != "operation"} for step in steps]},
        }


def _draw(draw: random.Random, pool: Pool) -> dict[str, Any]:
    held = [block for block in range(1, pool.num_blocks) if pool.refs[block]]
    cached = [block for block in range(1, pool.num_blocks) if pool.primary[block] is not None]
    choices = [{"op": "take", "count": draw.randint(1, len(pool.free))}] if len(pool.free) else []
    if held:
        released = draw.sample(held, draw.randint(1, len(held)))
        choices += [{"op": "release", "blocks": released}] * 2
        plain = [block for block in held if block not in cached]
        if plain:
            key = f"key{draw.randint(0, 9)}"
            choices += [{"op": "register", "block": draw.choice(plain), "key": key}] * 3
    if cached:
        choices += [{"op": "touch", "blocks": [draw.choice(cached)]}, {"op": "evict", "blocks": [draw.choice(cached)]}]
    choices.append({"op": "reset"})
    return draw.choice(choices)


def _perform(pool: Pool, operation: dict[str, Any]) -> list[int]:
    match operation["op"]:
        case "take":
            return pool.take(operation["count"])
        case "release":
            pool.release(operation["blocks"])
        case "touch":
            pool.touch(operation["blocks"])
        case "register":
            pool.insert((0, operation["key"]), operation["block"], 1)
        case "evict":
            pool.evict(operation["blocks"])
        case "reset":
            pool.reset()
    return []
