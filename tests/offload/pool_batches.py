"""Operations on a pool of chunks as a batch: noted while they are performed, to be performed again at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hkv.dialects.vllm.offload.plain import LISTS, ChunkPool, Context, Name, empty
from reference.dialects.vllm.offload.records import Code, Tier


class Noted(ChunkPool):
    """A pool, with a note of each operation: its code, its request, names of keys, whether it spares."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arguments = arguments
        self.noted: list[tuple[Code, Context | None, list[Name], bool]] = []

    def _do(self, code: Code, request: Context | None = None, keys: Sequence[Name] = (), spares: bool = False) -> int:
        self.noted.append((code, request, list(keys), spares))
        return super()._do(code, request, keys, spares)

    def batch(self, keys: int, uses: int, requests: int, operations: int, payload: int) -> Tier:
        """An empty tier of these sizes with all operations that were noted."""
        sizes = {"keys": keys, "named": uses, "requests": requests, "operations": operations, "payload": payload}
        tier = empty(*self.arguments, tells=False, room=256, **sizes, results=operations)
        names = {name: tier.keys[LISTS + at] for at, name in enumerate(self.keys, 1)}
        tier.known = LISTS + len(names)
        for name, key in names.items():
            key.group = name[1]
        rows: dict[Context, int] = {}
        named: dict[tuple[Context, Name], Any] = {}
        spare, start = iter(tier.named[1:]), 0
        for op, (code, request, about, spares) in zip(tier.operations[1:], self.noted, strict=False):
            op.code, op.start, op.count, op.spares, op.request = code, start, len(about), int(spares), 0
            if request is not None:
                op.request = rows.setdefault(request, len(rows) + 1)
                row = tier.requests[op.request]
                row.ends = row.ends or next(spare)
            for at, name in enumerate(about, start):
                if request is None:
                    tier.moving[at] = names[name]
                    continue
                if (request, name) not in named:
                    use = named[request, name] = next(spare)
                    use.key, use.end = names[name], request.positions[name]
                tier.payload[at] = named[request, name]
            start += len(about)
        return tier


def played(seed: int, *arguments: Any) -> Noted:
    """Random stores and loads of requests that share prefixes, transfers that end late or fail, requests that end."""
    draw, pool = random.Random(seed), Noted(*arguments)
    live: list[tuple[list[Name], Context]] = []
    writing: list[list[Name]] = []
    reading: list[list[Name]] = []
    for _ in range(160):
        if len(live) < 4:
            branch, length = draw.randrange(4), draw.randrange(2, 9)
            sizes = (1, 2)  # of the second group chunks are twice as long
            keys = [
                (100 * (branch if at > 2 else 0) + at, group)
                for group, size in enumerate(sizes)
                for at in range(size, length, size)
            ]
            live.append((keys, Context({key: key[0] % 100 for key in keys})))
        keys, request = draw.choice(live)
        some = draw.sample(keys, draw.randrange(1, len(keys) + 1))
        match draw.randrange(9):
            case 0 | 1 | 2:
                if (spares := draw.random() < 0.3) and draw.random() < 0.5:
                    pool.room(some, request, spares)
                stored = pool.store(some, request, spares)
                writing += [stored.keys] if stored is not None and stored.keys else []
            case 3 | 4 if writing:
                pool.complete_store(writing.pop(draw.randrange(len(writing))), ok=draw.random() < 0.9)
            case 5:
                if ready := [key for key in some if pool.lookup(key)]:
                    pool.load(ready, request)
                    reading.append(ready)
            case 6 if reading:
                pool.complete_load(reading.pop(draw.randrange(len(reading))))
            case 7:
                pool.use(some, request)
            case _:
                if draw.random() < 0.02:
                    pool.clear()
                    writing, reading = [], []
                else:
                    pool.end(request)
                    live = [each for each in live if each[1] is not request]
    return pool
