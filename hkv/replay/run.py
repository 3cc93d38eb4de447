"""Replays a trace: the requests on their way in, the cache that a dialect studies, the engine, and what is left."""

from __future__ import annotations

import abc
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Self

from hkv.contract.answer import EngineFactory
from hkv.errors import ConfigError, HKVError
from hkv.limits import whole_number
from hkv.model.topology import Group
from hkv.oracle.engines import engine_factory
from hkv.replay.agreement import compare_outcomes
from hkv.replay.attribution import Missed, attributed
from hkv.replay.observed import MOST, Boundaries, HitUnits, Occupancy
from hkv.replay.optimal import BoundedPool
from hkv.replay.schedule import Arrival, Recorder, Schedule, SharedArrivals, StepLoop
from hkv.replay.traces.interned import Interned, InternedTrace
from hkv.replay.traces.reader import TraceRequest, read_trace
from hkv.spec import spec_to_text

REFERENCE = "numpy"
"""The engine that `check` holds the chosen one against."""

COMPILED = "jax"
"""The engine whose replays are compiled whole, schedule included."""

EVICTS_NOTHING = "A pool that evicts nothing"
"""Name of the change that takes away all evictions, if the pool may be so large (`ReplayedCache.changed`)."""

MOST_WORDS = 1 << 28
"""Words that describe a cache, about, of two that compiled replays drive at the same time; larger ones take turns."""

Progress = Callable[[], None]
"""Called each time a request has finished or is refused for good."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Conversion of a trace's milliseconds to steps."""

    step_ms: int = 50
    speed: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if type(self.step_ms) is not int or self.step_ms < 1:
            raise ConfigError("step_ms", self.step_ms, "an integer of at least 1")
        if self.speed <= 0:
            raise ConfigError("speed", str(self.speed), "a positive number")

    def step_of(self, timestamp: float) -> int:
        """The first step that begins at or after a time stamp in milliseconds, exactly."""
        above, below = timestamp.as_integer_ratio()
        milliseconds, per = self._of_a_step
        return -(-above * per // (below * milliseconds))

    @functools.cached_property
    def _of_a_step(self) -> tuple[int, int]:
        """Milliseconds of a step in a trace's own time, as a fraction."""
        return (self.step_ms * self.speed).as_integer_ratio()


class ReplayedCache(abc.ABC):
    """A cache that a replay studies, under one dialect's rules.

    Attributes:
      config: the dialect's configuration.
      groups: groups of the cache.
      group_names: names of its groups: what the command line calls such layers.
      blocks: blocks that can be handed out, over all pools.
      key_tokens: tokens that one prefix key stands for.
      hit_units: units in which it finds prefixes.
      pools: its pools, each with its groups.
      reuses: whether prompts are looked up at all: prefix caching is on.
      eagle_groups: indices of the groups under the EAGLE drop rule.
      finer: tokens by which a hit may exceed a multiple of the unit of `hit_units`.
      reasons: names of the reasons why hits end, in the order in which tables list them; none where nothing tells.
      room: blocks that compiled programs have room for at least, so that caches of several sizes share one.
      sampling: steps between two samples of its occupancy at first; 0: none are taken.
      diagnoses: whether compiled programs find out why hits ended.
      tells: gets the hits of a compiled replay as they become known; None where no other replay waits for them.
      asks: hits of such a replay, up to which it is asked why hits ended; None where the arrivals say it.
      options: of one that `changed` gives, options of `hkv replay` that make it of the other, by name; a dialect that
        has none for it gives none.
    """

    room: int = 0
    sampling: int = 0
    diagnoses: bool = True
    tells: Boundaries[Any] | None = None
    asks: Boundaries[Any] | None = None
    finer: int = 0
    reasons: tuple[str, ...] = ()
    options: Mapping[str, str] = {}

    def __init__(
        self,
        config: Any,
        groups: Sequence[Group],
        pools: Sequence[BoundedPool],
        hit_units: HitUnits,
        *,
        reuses: bool = True,
        eagle_groups: Iterable[int] = (),
    ) -> None:
        self.config, self.groups, self.pools, self.hit_units = config, groups, pools, hit_units
        self.blocks, self.key_tokens = sum(pool.blocks for pool in pools), hit_units.block
        self.reuses, self.eagle_groups = reuses, frozenset(eagle_groups)
        self.group_names: Sequence[str] = [spec_to_text(group.spec) for group in groups]

    def changed(self, tokens: int, requests: int, schedule: Schedule) -> Mapping[str, ReplayedCache]:
        """The same cache with one cause of misses removed, by what was changed; none where the dialect offers none.

        All else stays: a second tier, too. Each has the `options` that make it.
        """
        return {}

    def made_by(self, **options: object) -> Self:
        """This cache, made of another by these options of `hkv replay`."""
        self.options = {name: str(value) for name, value in options.items()}
        return self

    def warnings(self, longest: int) -> Sequence[str]:
        """Sentences on what prompts of up to so many tokens are about to run into; none where all is well."""
        return ()

    @abc.abstractmethod
    def engine(self, name: str, make: EngineFactory) -> Any:
        """The empty engine that `make` makes, which is called `name` and takes requests by their keys."""

    @abc.abstractmethod
    def loop(
        self, schedule: Schedule, coming: Iterable[Arrival], driven: Any, oracle: Any, progress: Progress
    ) -> StepLoop:
        """The schedule in Python, over any engine; `oracle` is asked why hits ended, if it can tell."""

    def plain(
        self,
        schedule: Schedule,
        coming: Iterable[Arrival],
        driven: Any,
        oracle: Any,
        progress: Progress = lambda: None,
    ) -> Outcome:
        """Outcome of that schedule."""
        loop = self.loop(schedule, coming, driven, oracle, progress)
        started = time.perf_counter()
        steps = loop.run()
        return self.ran(loop, schedule, steps, time.perf_counter() - started)

    def lockstep(self, engine: Any, reference: Any, names: tuple[str, str]) -> Any:
        """An engine that performs everything on both and stops at the first answer that differs."""
        raise ConfigError("check", names[0], "a dialect whose engines can be run side by side")

    def require_compiled(self) -> None:
        """Make sure that the compiled schedule has all of the cache's rules."""
        raise ConfigError("engine", COMPILED, f"{REFERENCE}: these rules have no compiled schedule")

    def compiled(self, schedule: Schedule, coming: Sequence[Arrival], check: bool, progress: Progress) -> Outcome:
        """The compiled schedule over the compiled cache; checked, if wanted, by the plain one over the NumPy engine.

        Raises:
          HKVError: it has not the cache's rules.
          Difference: the check found one.
        """
        from hkv.replay import dispatches

        self.require_compiled()
        prepared = dispatches.incoming(coming, schedule.max_model_len)
        running = self.begun(schedule, prepared, check)
        started = time.perf_counter()
        steps = running.run((lambda: None) if check else progress, self.tells, self.asks)
        outcome = self.ran(running, schedule, steps, time.perf_counter() - started)
        if check:
            again = [dataclasses.replace(arrival, keys=prepared.keys_of(arrival.index)) for arrival in coming]
            self.verify(running, outcome, schedule, again, progress)
        return outcome

    def begun(self, schedule: Schedule, prepared: Any, check: bool) -> Any:
        """A compiled replay (`hkv.replay.lowered.LoweredReplay`) that has not run, and is to be checked or not."""
        raise NotImplementedError

    def ran(self, running: Any, schedule: Schedule, steps: int, seconds: float) -> Outcome:
        """Outcome of a replay, compiled or not, that took so many steps and seconds."""
        return Outcome(self, steps=steps, seconds=seconds, max_model_len=schedule.max_model_len, **running.left())

    def verify(
        self,
        running: Any,
        outcome: Outcome,
        schedule: Schedule,
        coming: Sequence[Arrival],
        progress: Progress = lambda: None,
    ) -> None:
        """Holds a compiled replay that has run against the plain schedule over the NumPy engine: every request's
        result, every step, and all that is left in the cache."""
        names, reference = (COMPILED, REFERENCE), self.engine(REFERENCE, engine_factory(REFERENCE))
        other = self.plain(schedule, coming, reference, reference, progress)
        compare_outcomes(outcome, other, names)
        self.compare_ends(running, reference, names)

    def compare_ends(self, running: Any, reference: Any, names: tuple[str, str]) -> None:
        """Compares what a compiled replay leaves in the cache with what the reference has then."""
        raise NotImplementedError

    def monitored(self, state: Any, requests: Iterable[tuple[float, Sequence[int]]]) -> Mapping[str, Any]:
        """Figures that the engine's operators would see after a replay, as plain values; none where HKV has none."""
        return {}

    def rows(self, totals: Mapping[str, Any]) -> Sequence[tuple[str, Any, str]]:
        """Rows of the table of totals that only this dialect has: what, value (None where unknown), remark."""
        return ()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A finished replay.

    Attributes:
      cache: the cache.
      recorder: everything that happened.
      steps: number of the last step + 1, skipped ones included.
      evictions: cached blocks handed out to another use, or None when the engine does not count them.
      seconds: wall time of the replay.
      max_model_len: most tokens that a request may have.
      extra: totals that only the dialect has, by name.
      trace: facts of the trace; None where the replay was not of one.
      occupancy: blocks of each group over time; None where nobody asked, or the dialect does not tell.
      state: the cache's state at the end, as the dialect's logs have it, when called; None if unknown.
      monitored: what the engine's operators would see then, when called.
      warmup: requests at the beginning that do not count as prompts, hits or misses.
      unevicted: the same replay in a pool that evicts nothing; None where nobody asked, or the dialect has none.
      one_by_one: that replay, each request coming when the one before has ended; None where it could not find more.
    """

    cache: ReplayedCache
    recorder: Recorder
    steps: int
    evictions: int | None
    seconds: float
    max_model_len: int
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trace: TraceFacts | None = None
    occupancy: Occupancy | None = None
    state: Callable[[], Any] | None = None
    monitored: Callable[[], Mapping[str, Any]] = dict
    warmup: int = 0
    unevicted: Outcome | None = None
    one_by_one: Outcome | None = None

    @functools.cached_property
    def missed(self) -> Missed:
        """Causes of its misses. Raises ValueError where it was not a replay of a trace."""
        return attributed(self)


@dataclasses.dataclass(frozen=True)
class TraceFacts:
    """Facts of a trace that say how far a replay's hits can be believed.

    Attributes:
      tokens_per_id: tokens that one of its ids stands for; 1 for token lists, 0 where it names no content.
      without_content: requests of which only lengths and times are known.
      synthetic: names of the models that made prefixes up.
      unresolved: of each request, tokens after `Arrival.seen` of which it cannot say whether they are shared.
      computed: of each request, tokens at most `Arrival.seen` that an earlier one had and computed by its end.
    """

    tokens_per_id: int
    without_content: int
    synthetic: tuple[str, ...]
    unresolved: Sequence[int]
    computed: Sequence[int]


def interned_arrivals(
    trace: InternedTrace,
    key_tokens: int,
    max_model_len: int,
    timing: Timing,
    lists: bool = True,
    asked: Sequence[int] = (),
) -> Iterator[Arrival]:
    """The requests of a trace on their way in, with the tokens that earlier requests had too.

    Keys are lists for engines in Python, else int32 arrays.
    """
    keys, seen = trace.keys(key_tokens, max_model_len), trace.shared(max_model_len)[0].tolist()
    asked = asked or [0] * len(seen)
    for index, request in enumerate(trace.requests):
        step = timing.step_of(request.timestamp)
        made: Any = functools.partial(_keys if lists else Interned.of, keys, index)
        yield Arrival(index, step, request.input_length, request.output_length, made, seen[index], asked[index])


def _keys(keys: Interned, index: int) -> list[int]:
    return keys.of(index).tolist()


def default_engine(cache: ReplayedCache) -> tuple[str, str]:
    """The compiled engine; where it cannot represent the cache, the NumPy engine and the reason."""
    try:
        cache.require_compiled()
    except HKVError as error:
        plain = f"{REFERENCE}: "
        return REFERENCE, error.expected.removeprefix(plain) if error.expected.startswith(plain) else str(error)
    return COMPILED, ""


def replay(
    trace: str | Sequence[TraceRequest] | InternedTrace,
    cache: ReplayedCache,
    schedule: Schedule,
    timing: Timing,
    *,
    engine: str = REFERENCE,
    check: bool = False,
    tokens_per_id: int | None = None,
    limit: int | None = None,
    sampled: bool = False,
    causes: bool = True,
    warmup: str = "0",
    progress: Progress = lambda: None,
) -> Outcome:
    """Replays a trace.

    `trace` is a path (`-` is standard input), requests, or what is known of them from other replays; `limit` is for a
    path. With `check` the NumPy engine runs too, at once or, where the replay is compiled whole, after it, and all is
    compared. With `causes` the trace is also replayed in a pool that evicts nothing, as it comes and with one request
    after another, by the same engine if that is one of HKV's; this is not checked. `warmup` is as `warmup_requests`
    takes it.

    Raises:
      HKVError: the trace, the configuration or the engine cannot be used.
      Difference: the engines disagree.
    """
    if check and engine == REFERENCE:
        raise ConfigError("check", engine, f"an engine other than {REFERENCE}, which it is held against")
    if not isinstance(trace, InternedTrace):
        trace = InternedTrace(read_trace(trace, tokens_per_id, limit) if isinstance(trace, str) else trace)
    last = max((timing.step_of(each.timestamp) for each in trace.requests[-1:]), default=0)
    cache.sampling = max(1, last // MOST) if sampled else 0
    driven = None if engine == COMPILED else cache.engine(engine, engine_factory(engine))
    cache.diagnoses, first = causes, warmup_requests(warmup, len(trace.requests))
    other = _without_evictions(trace, cache, schedule, timing, engine, check) if causes else None
    asked: Sequence[int] = ()
    if other is not None and cache.asks is None:
        records = other.found().recorder.requests
        asked = [records[index].hit for index in range(len(records))]
    coming = _coming(trace, cache, schedule, timing, engine, asked)
    outcome = _replayed(coming, cache, schedule, engine, driven, check, progress)
    unevicted = None if other is None else dataclasses.replace(other.found(), warmup=first)
    alone = None if unevicted is None else _one_by_one(trace, cache, unevicted, schedule, timing, engine)
    facts = TraceFacts(
        trace.granularity,
        sum(not request.tokens_per_id for request in trace.requests),
        tuple(sorted({request.synthetic for request in trace.requests} - {""})),
        trace.shared(schedule.max_model_len)[1].tolist(),
        trace.shared(schedule.max_model_len, schedule.decode_tokens)[0].tolist(),
    )
    keys = trace.keys(cache.key_tokens, schedule.max_model_len)

    def monitored() -> Mapping[str, Any]:
        if outcome.state is None:
            return {}
        whole = ((each.timestamp, each.input_length // cache.key_tokens) for each in trace.requests)
        prompts = ((now, keys.of(index)[:count].tolist()) for index, (now, count) in enumerate(whole))
        return cache.monitored(outcome.state(), prompts)

    return dataclasses.replace(
        outcome, trace=facts, monitored=monitored, unevicted=unevicted, warmup=first, one_by_one=alone
    )


def warmup_requests(text: str, requests: int) -> int:
    """Requests at the beginning of a trace that do not count: a number, or a percentage such as `50%`, rounded down."""
    number = whole_number(text.removesuffix("%"))
    count = None if number is None else number * requests // 100 if text.endswith("%") else number
    if count is None or not 0 <= count < requests:
        raise ConfigError("warmup", text, f"a number of requests below {requests}, or a percentage below 100%")
    return count


def _coming(
    trace: InternedTrace, cache: ReplayedCache, schedule: Schedule, timing: Timing, engine: str, asked: Sequence[int]
) -> Iterable[Arrival]:
    """The requests on their way in; those of a compiled replay that is asked nothing are made once for all."""
    known = cache.key_tokens, schedule.max_model_len, timing
    compiled = engine == COMPILED
    if not compiled or asked:
        return interned_arrivals(trace, *known, lists=not compiled, asked=asked)
    if known not in trace.arrivals:
        trace.arrivals[known] = SharedArrivals(interned_arrivals(trace, *known, lists=False))
    return trace.arrivals[known]


def without_evictions(trace: InternedTrace, cache: ReplayedCache, schedule: Schedule) -> ReplayedCache | None:
    """The same cache with a pool that evicts nothing of a trace; None where its dialect has none, or nothing is cached.

    Where no pool may be so large, it is the largest, and evicts something still.
    """
    lengths = [each.input_length + each.output_length for each in trace.requests]
    served = [length for length in lengths if length <= schedule.max_model_len]
    return cache.changed(sum(served), len(served), schedule).get(EVICTS_NOTHING)


def _without_evictions(
    trace: InternedTrace, cache: ReplayedCache, schedule: Schedule, timing: Timing, engine: str, check: bool
) -> Boundaries[Outcome] | None:
    """The replay in a pool that evicts nothing; its hits are the boundaries up to which the other one is asked.

    Two compiled replays go on at the same time where it is known when requests arrive, and where both fit.
    """
    cache.asks = None
    changed = without_evictions(trace, cache, schedule)
    if changed is None:
        return None
    driving, engine = engine, _engine_of(cache, changed, engine)
    if not cache.sampling:  # both replays share one program; samples look at all blocks that there is room for
        cache.room = changed.room = max(cache.room, changed.blocks + 1)
    prompts = [each.input_length for each in trace.requests]
    seen = cache.hit_units.boundaries(prompts, trace.shared(schedule.max_model_len)[0])[-1]
    coming = _coming(trace, changed, schedule, timing, engine, seen.tolist())
    driven = None if engine == COMPILED else changed.engine(engine, engine_factory(engine))
    found: Boundaries[Outcome] = Boundaries(len(prompts))
    if engine == driving == COMPILED and not check and not schedule.closed_loop and _both_fit(trace, cache, schedule):
        cache.asks = changed.tells = found
    found.begin(lambda: _replayed(coming, changed, schedule, engine, driven, False, lambda: None))
    return found


def _engine_of(cache: ReplayedCache, changed: ReplayedCache, engine: str) -> str:
    """Engine of HKV's that replays a changed cache: NumPy's where it was chosen although the cache can be compiled."""
    chosen = engine == REFERENCE and default_engine(cache)[0] == COMPILED
    return REFERENCE if chosen else default_engine(changed)[0]


def _one_by_one(
    trace: InternedTrace, cache: ReplayedCache, unevicted: Outcome, schedule: Schedule, timing: Timing, engine: str
) -> Outcome | None:
    """The replay in a pool that evicts nothing, each request coming when the one before has ended.

    None where all that was computed before is found anyway.
    """
    changed = unevicted.cache
    prompts = [each.input_length for each in trace.requests]
    computed = trace.shared(schedule.max_model_len, schedule.decode_tokens)[0]
    most = cache.hit_units.boundaries(prompts, computed)[-1]
    records = unevicted.recorder.requests
    if not any(record.admitted >= 0 and record.hit < most[index] for index, record in records.items()):
        return None
    changed.tells = changed.asks = None
    apart = dataclasses.replace(schedule, closed_loop=1)
    return replay(trace, changed, apart, timing, engine=_engine_of(cache, changed, engine), causes=False)


def _both_fit(trace: InternedTrace, cache: ReplayedCache, schedule: Schedule) -> bool:
    keys = int(trace.keys(cache.key_tokens, schedule.max_model_len).keys.max(initial=0)) + 1
    return keys * (len(cache.groups) + 1) + 6 * max(cache.room, cache.blocks) <= MOST_WORDS


def _replayed(
    coming: Iterable[Arrival],
    cache: ReplayedCache,
    schedule: Schedule,
    engine: str,
    driven: Any,
    check: bool,
    progress: Progress,
) -> Outcome:
    if driven is None:
        return cache.compiled(schedule, coming if isinstance(coming, list) else list(coming), check, progress)
    oracle = driven
    if check:
        oracle = cache.engine(REFERENCE, engine_factory(REFERENCE))
        driven = cache.lockstep(driven, oracle, (engine, REFERENCE))
    return cache.plain(schedule, coming, driven, oracle, progress)
