"""Request traces through the cache, a share of all blocks for the window's pool, and why hits ended."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from hkv.contract.options import option
from hkv.replay.observed import EVICTED, HAD, NEVER_SEEN, MissReason
from hkv.replay.plain import PlainLoop, PlainMisses, PlainReplayCommand
from hkv.replay.schedule import LiveRequest
from two_pools.cache import FULL, WINDOW, RadixPools
from two_pools.log import AdmitOp, AppendOp, FreeOp


class PoolsLoop(PlainLoop):
    """The schedule's questions as operations."""

    def _found(self, live: LiveRequest, tokens: list[int]) -> int:
        return len(self._engine.longest(self._engine.walk(tokens[:-1]))) * self._engine.size

    def _enter(self, live: LiveRequest, tokens: list[int]) -> int | None:
        answer = self._engine.perform(AdmitOp(id=live.id, tokens=tokens))
        return None if answer.blocks is None else answer.hit

    def _append(self, live: LiveRequest, tokens: list[int]) -> bool:
        return self._engine.perform(AppendOp(id=live.id, tokens=tokens)).blocks is not None

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        self._engine.perform(FreeOp(id=live.id, keep=finished))

    def _available(self) -> int:
        engine: RadixPools = self._engine
        return sum(len(engine.free_blocks[pool]) + len(engine.evictable(pool)) for pool in (FULL, WINDOW))


class PoolsMisses(PlainMisses):
    """Full attention lacks pages that are not in the tree, the window blocks that pages in the tree have lost."""

    reasons = (HAD, NEVER_SEEN, EVICTED)

    def __init__(self, engine: RadixPools, key_tokens: int) -> None:
        self._engine = engine

    def miss_reasons(self, keys: Sequence[int], hit: int, asked: int) -> tuple[int, list[MissReason]]:
        size = self._engine.size
        path = self._engine.walk([int(key) for key in keys[: asked // size] for _ in range(size)])
        window = HAD if len(self._engine.longest(path)) == len(path) else EVICTED
        return len(path) * size, [MissReason(HAD if len(path) * size >= asked else NEVER_SEEN), MissReason(window)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolsOptions:
    """An option of `hkv replay` that this dialect adds, and `hkv sweep` varies."""

    window_share: float | None = option(
        type=click.FloatRange(0, 1, min_open=True, max_open=True),
        help="two-pools: the window's share of --num-blocks.",
    )


class PoolsReplay(PlainReplayCommand):
    """Both pools by their blocks, or all blocks and the window's share of them."""

    declared = PoolsOptions

    def __init__(self) -> None:
        super().__init__(PoolsLoop, PoolsMisses)

    def num_blocks(self, options: dict[str, Any]) -> Sequence[int]:
        share, blocks = options["window_share"], options["num_blocks"]
        if share is None or len(blocks) != 1:
            return blocks
        window = max(1, int(blocks[0] * share))
        return blocks[0] - window, window
