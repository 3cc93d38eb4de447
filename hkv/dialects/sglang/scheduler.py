"""Schedules of a replay under SGLang's rules: the replay's own (`SGLangLoop`), and SGLang's (`SGLangScheduler`).

Under SGLang's, a step is a pass over prompts, or, if none may be computed, tokens are decoded. A pass lets in waiting
requests, in the order of a policy, as long as an estimate says that there will be room for what they and those that
run may still generate; one prompt at most is computed in chunks. When tokens to be decoded find no room, requests are
retracted: those that generated least come again.

After SGLang 0.5.23, `scheduler.py`, `schedule_policy.py` and `mem_cache/prefill_budget.py`, of one process without
overlap, mixed chunks, priorities, speculation or states; `--step-tokens` is its `--chunked-prefill-size`, and a step
decodes `--decode-tokens` tokens one after another.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import SLIDE_EVERY, STATE_CHUNK, STATES_A_REQUEST, SGLangConfig
from hkv.errors import ConfigError, OperationError
from hkv.replay.plain import TokenLoop
from hkv.replay.schedule import FINISHED, LiveRequest, Refusal, Schedule
from hkv.version import check_reference

check_reference()  # before the first import of it

from reference.dialects.sglang.requests import kept_state  # noqa: E402

POLICIES = ("fcfs", "lpm")
"""`--schedule-policy`: first come, first served, SGLang's default, or the longest cached prefix first."""

MAX_PREFILL_TOKENS, CLIP, RETRACT_STEPS = 16384, 4096, 20
"""`--max-prefill-tokens`, `SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION` and `SGLANG_RETRACT_DECODE_STEPS`."""

INIT_RATIO, MIN_FACTOR, DECAY_STEPS = 0.7, 0.14, 600
"""Share of what running requests may still generate that is held free: at first, at last, and steps until then."""

MOST_MATCHED, REFRESH_EVERY, IN_BATCH = 128, 32, 32
"""Waiting requests that are looked up, passes after which first-come order does so, and tokens that two must share."""

GO, NO_TOKEN, OTHER = "go", "no token", "other"
"""`AddReqResult`."""


def bounded(config: SGLangConfig, schedule: Schedule) -> Schedule:
    """A schedule under which no more requests run than states suffice for.

    Raises:
      ConfigError: they suffice for none, or none is of a length that ends a page.
    """
    if config.most_running is None:
        return schedule
    if not config.most_running:
        raise ConfigError("num_blocks", config.states, f"{STATES_A_REQUEST} states at least: those of a request")
    if config.state_grid != max(STATE_CHUNK, config.page_size):
        raise ConfigError("page_size", config.page_size, f"tokens that divide {STATE_CHUNK}, or are divided by it")
    return dataclasses.replace(schedule, max_running=min(schedule.max_running, config.most_running))


class SGLangLoop(TokenLoop):
    """The schedule's questions as operations; `_came` says with how many tokens each running request came, `_branch`
    where the tree's prefix went on without a state."""

    def __init__(self, engine: Any, key_tokens: int, schedule: Schedule, *given: Any) -> None:
        self._config = structs.to_config(engine.header)
        super().__init__(engine, key_tokens, bounded(self._config, schedule), *given)
        self._came: dict[str, int] = {}
        self._branch: dict[str, int] = {}

    def _admit(self, live: LiveRequest, budget: int) -> tuple[int, int] | Refusal:
        found = self._engine.perform(structs.AdmitOp(id=live.id, tokens=self._named(live, 0)))
        self._came[live.id] = live.tokens
        grid = self._config.state_grid
        self._branch[live.id] = found.full // grid * grid
        new = min(live.tokens - found.hit, budget)
        if not self._chunk(live, found.hit, found.hit + new):
            self._free(live, finished=False)
            return Refusal.PUT_OFF
        return found.hit, new

    def _grow(self, live: LiveRequest, new: int) -> bool:
        if live.computed < self._came[live.id]:
            return self._chunk(live, live.computed, live.computed + new)
        for token in self._named(live, self._held[live.id])[: live.computed + new - self._held[live.id]]:
            self._engine.perform(structs.SlideOp(id=live.id, every=SLIDE_EVERY))
            track = self._config.tracked and (self._held[live.id] + 1) % self._config.track_interval == 0
            if self._engine.perform(structs.DecodeOp(id=live.id, token=token, track=track)).slots is None:
                return False
            self._held[live.id] += 1
        return True

    def _chunk(self, live: LiveRequest, start: int, length: int) -> bool:
        branch, grid = self._branch.get(live.id, 0), self._config.state_grid
        track = kept_state(start, length, branch, grid) if self._config.tracked else 0
        granted = self._engine.perform(structs.ExtendOp(id=live.id, length=length, track=track)).slots is not None
        if granted:
            self._held[live.id] = length
        return granted

    def _advance(self, live: LiveRequest, tokens: int) -> None:
        if live.computed < self._came[live.id]:
            self._engine.perform(structs.CheckpointOp(id=live.id))

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        kind = structs.FinishOp if finished else structs.AbortOp
        self._engine.perform(kind(id=live.id))

    def _available(self) -> int:
        return self._engine.num_available()


@dataclasses.dataclass
class FreeTokens:
    """Tokens of each pool that are free or may be evicted; `window` is None without a window group."""

    full: int
    window: int | None


@dataclasses.dataclass
class Budget:
    """The rest of what one pass may take (`PrefillAdder`, `PrefillBudget`, `SWAPrefillBudget`).

    Attributes:
      page: tokens of a page.
      window: tokens of the window, or None; `window_pool` are the tokens of its pool.
      chunk: tokens that the pass may still compute (`rem_chunk_tokens`); `prompt`: those of prompts
        (`rem_input_tokens`).
      total, current, slid: tokens spoken for: until requests end, in this pass, and of the window's pool.
    """

    page: int
    window: int | None
    window_pool: int
    chunk: int
    total: float
    prompt: int = MAX_PREFILL_TOKENS
    current: int = 0
    slid: int = 0

    def state(self, room: FreeTokens) -> str:
        """Reason why the pass ends, or that it goes on (`budget_state`)."""
        if room.full <= max(self.total, self.current) or (room.window is not None and room.window <= self.slid):
            return NO_TOKEN
        return OTHER if self.prompt <= 0 or self.chunk <= 0 else GO

    def add(self, room: FreeTokens, left: int, more: int, output: int) -> int | str:
        """Tokens of a prompt that are computed in this pass, or why none are (`add_one_req`).

        Args:
          room: without what the request would hold.
          left: tokens that it has to compute.
          more: tokens that it may still generate, clipped.
          output: tokens that it may generate in all, clipped.
        """
        if left + more + self.page >= room.full - self.total:
            return NO_TOKEN
        limit = self.chunk
        if room.window is not None:
            needed = self._of_window(self._paged(left), more)
            if needed >= room.window - self.slid:
                cap = 0
                if needed >= self.window_pool:
                    cap = max(0, (room.window - self.slid - self._of_window(0, more)) // self.page * self.page)
                if cap <= 0:
                    return NO_TOKEN
                limit = min(limit, cap)
        if self._paged(left) > limit:
            left, output = limit // self.page * self.page, 0
            if left <= 0:
                return OTHER
        self._charge(left, output)
        return left

    def go_on(self, room: FreeTokens, left: int, output: int) -> int | None:
        """Tokens of the prompt that is computed in chunks; None if it has to wait (`add_chunked_req`)."""
        limit = min(self.chunk, int(room.full - self.total))
        if room.window is not None:
            limit = min(limit, room.window - self.slid - self.page)
            if limit <= 0:
                return None
        elif limit <= 0:
            limit = self.chunk
        new = min(left, limit)
        self._charge(new, output if new == left else 0)
        return new

    def _charge(self, new: int, output: int) -> None:
        paged = self._paged(new)
        if self.window is not None:
            self.slid += self._of_window(paged, output)
        self.total += paged + self.page + output
        self.current += paged + self.page
        self.prompt -= paged
        self.chunk -= paged

    def _paged(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _of_window(self, new: int, more: int) -> int:
        """Tokens of the window's pool that a request takes at most (`estimate_swa_kv_tokens`)."""
        assert self.window is not None
        return max(min(new, self.chunk) - self.window, 0) + min(new + more, self.window) + self.page


class SGLangScheduler(SGLangLoop):
    """The replay's requests under SGLang's scheduler.

    Args:
      policy: one of `POLICIES`.
      given: as `SGLangLoop`.
    """

    def __init__(self, policy: str, *given: Any) -> None:
        super().__init__(*given)
        self._policy = policy
        if self._config.states is not None:
            raise OperationError("schedule_policy", policy, "none: SGLang's scheduler is not ruled for states")
        self._ratio, self._full, self._calls = INIT_RATIO, False, 0
        self._chunked: LiveRequest | None = None
        self._entering = False
        self._decodes: dict[str, int] = {}

    def _present(self) -> int:
        return super()._present() + (self._chunked is not None)

    def _rest(self, step: int) -> None:
        self._ratio = INIT_RATIO

    def _step(self, step: int) -> None:
        if self._chunked is not None and self._entering:
            self._engine.perform(structs.CheckpointOp(id=self._chunked.id))
        self._entering = False
        batch = self.decide(step)
        self._allot(batch)
        running = len(self._running) + len(batch) - sum(live is self._chunked for live, _ in batch)
        self._observer.scheduled(step, running, len(self._waiting), self._available())
        if batch:
            self._compute_prompts(step, batch)
        elif self._running:
            for _ in range(self._schedule.decode_tokens):
                self._decode(step)
        elif self._chunked is not None:  # SGLang would wait for ever
            stuck, self._chunked = self._chunked, None
            self._free(stuck, finished=False)
            self._refuse_for_good(step, stuck)
        elif self._waiting:
            self._refuse_for_good(step, self._waiting.popleft())

    def decide(self, step: int) -> list[tuple[LiveRequest, int]]:
        """Requests whose prompts this pass computes, and up to where (`get_new_batch_prefill`)."""
        self._full = self._full and self._config.window is None and bool(self._running)
        if (self._full or not self._waiting) and self._chunked is None:
            return []
        if len(self._running) >= self._schedule.max_running and self._chunked is None:
            self._full = True
            return []
        self._order()
        budget, batch = self._budget(), list[tuple[LiveRequest, int]]()
        if (live := self._chunked) is not None:
            left = live.tokens - live.computed
            new = budget.go_on(self._room(), left, min(live.arrival.output, CLIP))
            if new is not None:
                batch.append((live, live.computed + new))
                self._chunked = live if new < left else None
        for live in list(self._waiting):
            if budget.state(self._room()) == OTHER:
                break
            self._full = self._full or len(batch) >= self._schedule.max_running - len(self._running)
            if self._full:
                break
            verdict = self._let_in(step, live, budget, batch)
            if verdict != GO:
                self._full = self._full or (verdict == NO_TOKEN and bool(batch or self._running))
                break
        return batch

    def _let_in(self, step: int, live: LiveRequest, budget: Budget, batch: list[tuple[LiveRequest, int]]) -> str:
        """Lets a request in, if it may; whether the pass goes on."""
        found = self._engine.perform(structs.AdmitOp(id=live.id, tokens=self._named(live, 0)))
        output, made = live.arrival.output, live.tokens - live.arrival.prompt
        left = live.tokens - found.hit
        new = budget.add(self._room(), left, min(max(output - made, 0), CLIP), min(output, CLIP))
        if not isinstance(new, str) and new < left and self._chunked is not None:
            new = OTHER  # one prompt at a time is computed in parts; SGLang 0.5.23 would forget one, or assert
        if isinstance(new, str):
            self._free(live, finished=False)
            return new
        self._waiting.remove(live)
        self._observer.admitted(step, live, found.hit)
        live.computed, self._decodes[live.id] = found.hit, 0
        batch.append((live, found.hit + new))
        if new < left:
            self._chunked = live
        return budget.state(self._room())

    def _budget(self) -> Budget:
        held = 0.0
        for live in self._running:
            held += min(live.arrival.output - (live.tokens - live.arrival.prompt), CLIP) * self._ratio
        sizes = self._config.num_slots
        return Budget(self._config.page_size, self._config.window, sizes[-1], self._schedule.step_tokens, held)

    def _room(self, tokens: int = 0) -> FreeTokens:
        """Room in each pool, once so many tokens are made free, or as many as may be."""
        told = self._engine.perform(structs.RoomOp(tokens=tokens))
        both = [free + idle for free, idle in zip(told.available, told.evictable, strict=True)]
        return FreeTokens(both[0], both[1] if len(both) > 1 else None)

    def _order(self) -> None:
        """Puts the queue in the policy's order; being looked up counts as a use (`calc_priority`)."""
        queue = list(self._waiting)
        if self._policy == "lpm" and len(queue) <= MOST_MATCHED:
            self._waiting = collections.deque(self._longest_first(queue))
        elif queue and self._config.policy == "lru":
            if self._calls % REFRESH_EVERY == 0:
                for live in reversed(queue[:MOST_MATCHED]):
                    self._matched(live)
            self._calls += 1

    def _longest_first(self, queue: list[LiveRequest]) -> list[LiveRequest]:
        """Those with more in the cache first; last those that begin as one before them does, which will have more."""
        known, places = list[list[int]](), dict[str, float]()
        for live in queue:
            hit, tokens = self._matched(live), self._named(live, 0)
            places[live.id] = -hit
            if hit <= IN_BATCH:
                if any(tokens[:IN_BATCH] == other[:IN_BATCH] and len(tokens) >= IN_BATCH for other in known):
                    places[live.id] = math.inf
                else:
                    known.append(tokens)
        return sorted(queue, key=lambda live: places[live.id])

    def _matched(self, live: LiveRequest) -> int:
        return self._engine.perform(structs.MatchOp(tokens=self._named(live, 0)[:-1])).hit

    def _allot(self, batch: list[tuple[LiveRequest, int]]) -> None:
        """Slots for a pass: first room for all of them, then theirs in turn (`alloc_for_extend`)."""
        page = self._config.page_size
        if batch:
            spare = len(batch) * page if page > 1 else 0
            self._room(sum(length - live.computed for live, length in batch) + spare)
        for live, length in batch:
            if not self._chunk(live, live.computed, length):
                raise OperationError("id", live.id, f"room for {length} tokens, where SGLang's scheduler let it in")

    def _compute_prompts(self, step: int, batch: list[tuple[LiveRequest, int]]) -> None:
        for live, length in batch:
            live.computed = length
            if live is self._chunked:
                self._entering, self._full = True, False
            elif self._goes_on(step, live):
                self._engine.perform(structs.CheckpointOp(id=live.id))
                self._running.append(live)

    def _goes_on(self, step: int, live: LiveRequest) -> bool:
        """A request has one more token, whose slot it gets when it is read; false if that is its last, and it ends."""
        live.tokens += 1
        if live.tokens - live.arrival.prompt < live.arrival.output:
            return True
        self._full = False
        self._free(live, finished=True)
        self._observer.ended(step, live.arrival, FINISHED)
        return False

    def _decode(self, step: int) -> None:
        """A token of every running request (`update_running_batch`)."""
        if self._fits(self._running):
            least = INIT_RATIO * MIN_FACTOR
            self._ratio = max(self._ratio - (INIT_RATIO - least) / DECAY_STEPS, least)
        else:
            self._retract(step)
        page = self._config.page_size
        for live in self._running:
            if self._decodes[live.id]:
                self._engine.perform(structs.SlideOp(id=live.id, every=SLIDE_EVERY))
            self._decodes[live.id] += 1
        if self._running:
            self._room(len(self._running) * page)
        for live in list(self._running):
            (token,) = self._named(live, live.computed)
            if self._engine.perform(structs.DecodeOp(id=live.id, token=token)).slots is None:
                raise OperationError("id", live.id, "room for one more token, which was looked for before")
            live.computed += 1
            if not self._goes_on(step, live):
                self._running.remove(live)

    def _fits(self, running: list[LiveRequest]) -> bool:
        """True if there is room for the next token of these, once what may leave for it has left."""
        page = self._config.page_size
        needed = page * sum(live.computed % page == 0 for live in running)
        return min(self._engine.perform(structs.RoomOp(tokens=needed)).available) >= needed

    def _retract(self, step: int) -> None:
        """Sends requests back until the rest fits: first those that generated least, of these the longest prompt."""

        def made(live: LiveRequest) -> int:
            return live.tokens - live.arrival.prompt

        kept = sorted(self._running, key=lambda live: (made(live), -live.arrival.prompt), reverse=True)
        gone, first = list[LiveRequest](), True
        while len(kept) > 1 and (first or not self._fits(kept)):
            first = False
            gone.append(victim := kept.pop())
            self._free(victim, finished=False)
            self._room(len(kept) * RETRACT_STEPS)
        if len(kept) == 1 and not self._fits(kept):
            self._free(kept[0], finished=False)
            self._refuse_for_good(step, kept.pop())
        self._running, self._full = kept, False
        for victim in gone:
            victim.computed, victim.preemptions = 0, victim.preemptions + 1
            self._waiting.append(victim)
            self._observer.preempted(victim)
        held = sum(made(live) + RETRACT_STEPS for live in kept) / (sum(live.arrival.output for live in kept) + 1)
        self._ratio = min(1.0, held)
