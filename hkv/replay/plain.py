"""Replays of dialects that have nothing of their own besides engines: log headers configure, operations name tokens."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.contract.log import PlainHeader
from hkv.errors import ConfigError
from hkv.model.topology import Topology
from hkv.replay.command import ReplayCommand, StudiedCache, groups_text, schedule_for_groups
from hkv.replay.observed import HitReasons, HitUnits
from hkv.replay.optimal import BoundedPool
from hkv.replay.run import EVICTS_NOTHING, Progress, ReplayedCache
from hkv.replay.schedule import Arrival, LiveRequest, Recorder, Refusal, Schedule, StepLoop
from hkv.spec import LayerSpec, spec_to_log


class TokenLoop(StepLoop):
    """A schedule in which requests are named by tokens; `_held` says how many of each running one's have slots.

    A trace says which prefixes are equal, not what they consist of: the tokens of a block are its prefix key, over and
    over; those after the last key are -1.

    Attributes:
      asks: whether the observer sees lookups before blocks are asked for.
    """

    asks: bool = False

    def __init__(
        self, engine: Any, key_tokens: int, schedule: Schedule, arrivals: Iterable[Arrival], observer: Recorder
    ) -> None:
        super().__init__(engine, schedule, arrivals, observer)
        self._key_tokens = key_tokens
        self._held: dict[str, int] = {}

    def _named(self, live: LiveRequest, first: int) -> list[int]:
        """Tokens of a request from the `first` on."""
        known = min(live.tokens, len(live.keys) * self._key_tokens)
        named = [int(live.keys[place // self._key_tokens]) for place in range(first, known)]
        return named + [-1] * (live.tokens - max(first, known))


class PlainLoop(TokenLoop):
    """A schedule in which a whole prompt gets its blocks at once."""

    def _found(self, live: LiveRequest, tokens: list[int]) -> int:
        """Tokens that an admission would find now; nothing is changed. Asked where the dialect tells of misses."""
        raise NotImplementedError

    @abc.abstractmethod
    def _enter(self, live: LiveRequest, tokens: list[int]) -> int | None:
        """Asks for the blocks of a request with these tokens; how many of them were cached, None when refused."""

    @abc.abstractmethod
    def _append(self, live: LiveRequest, tokens: list[int]) -> bool:
        """Asks for blocks for more tokens; False when refused."""

    def _admit(self, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        tokens = self._named(live, 0)
        if self.asks:
            self._observer.looked_up(live, self._found(live, tokens))
        hit = self._enter(live, tokens)
        if hit is None:
            return Refusal.PUT_OFF
        self._held[live.id] = live.tokens
        return hit, min(live.tokens - hit, budget)

    def _grow(self, live: LiveRequest, new: int) -> bool:
        more = self._named(live, self._held[live.id])
        if more and not self._append(live, more):
            return False
        self._held[live.id] = live.tokens
        return True


class PlainMisses(HitReasons, Protocol):
    """Says of an engine what groups lack beyond a hit; `reasons` are all that it may name, as tables list them."""

    reasons: ClassVar[tuple[str, ...]]

    def __init__(self, engine: Any, key_tokens: int) -> None: ...


class PlainCache(ReplayedCache):
    """A cache configured by a log header, whose engines are the oracle's, and which has no compiled schedule."""

    def __init__(
        self,
        header: PlainHeader,
        specs: Sequence[LayerSpec],
        loop: Callable[..., TokenLoop],
        misses: type[PlainMisses] | None = None,
    ) -> None:
        blocks, groups = header.num_blocks, Topology.of_specs(specs).groups
        counts, grouped = (blocks, [[spec] for spec in specs]) if isinstance(blocks, list) else ([blocks], [specs])
        pools = [BoundedPool(count, each) for count, each in zip(counts, grouped, strict=True)]
        key_tokens = math.gcd(*(group.spec.block_size for group in groups))
        super().__init__(header, groups, pools, HitUnits(key_tokens, key_tokens))
        self._specs, self._loop, self._misses, self._tells = specs, loop, misses, False
        self.reasons = () if misses is None else misses.reasons

    def changed(self, tokens: int, requests: int, schedule: Schedule) -> Mapping[str, ReplayedCache]:
        """A cache of so many blocks that nothing is ever evicted: those of all requests, a last one each not full."""
        most = [tokens // spec.block_size + 2 * requests + schedule.lookahead + 1 for spec in self._specs]
        counts = self.config.num_blocks
        pools = [*map(max, most, counts)] if isinstance(counts, list) else [max(sum(most), counts)]
        return {EVICTS_NOTHING: self.sized(pools)}

    def sized(self, counts: list[int]) -> PlainCache:
        """The same cache with pools of so many blocks."""
        blocks = counts if isinstance(self.config.num_blocks, list) else counts[0]
        header = msgspec.structs.replace(self.config, num_blocks=blocks)
        made = type(self)(header, self._specs, self._loop, self._misses)
        return made.made_by(num_blocks=",".join(map(str, counts)))

    def engine(self, name: str, make: EngineFactory) -> Any:
        self._tells = self._misses is not None and name in registry.dialect_of(self.config.dialect).engines
        return make(self.config)

    def loop(
        self, schedule: Schedule, coming: Iterable[Arrival], driven: Any, oracle: Any, progress: Progress
    ) -> TokenLoop:
        misses = self._misses(driven, self.key_tokens) if self._misses is not None and self._tells else None
        loop = self._loop(driven, self.key_tokens, schedule, coming, Recorder(self.blocks + 1, misses, progress))
        loop.asks = misses is not None
        return loop


class PlainReplayCommand(ReplayCommand):
    """Groups over one pool, or over one each where the dialect's logs begin with a `PooledHeader`."""

    cache: type[PlainCache] = PlainCache
    """The cache that is studied."""

    def __init__(self, loop: Callable[..., TokenLoop], misses: type[PlainMisses] | None = None) -> None:
        self._loop, self._misses = loop, misses

    def num_blocks(self, options: dict[str, Any]) -> Sequence[int]:
        """Blocks of the pool, or of each pool; as `--num-blocks` has them unless the dialect divides them up."""
        return options["num_blocks"]

    def header(self, options: dict[str, Any]) -> PlainHeader:
        """Header of the cache that the options ask for."""
        groups = [spec_to_log(spec) for spec in options["groups"]]
        name = options["dialect"]
        return registry.dialect_of(name).header_of(name, groups, self.num_blocks(options))

    def of_groups(self, options: dict[str, Any]) -> StudiedCache:
        for name, default in (("caching", True), ("lookahead", 0)):
            if options[name] != default:
                raise ConfigError(name, options[name], f"{default}: {options['dialect']} has no other")
        cache = self.cache(self.header(options), options["groups"], self._loop, self._misses)
        return StudiedCache(cache, schedule_for_groups(options), groups_text(options["groups"]))
