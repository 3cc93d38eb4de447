"""A replay under SGLang's rules: what a request asks of the cache, operation by operation.

A request takes what is cached and gets pages for its first chunk, or gives up what it took. Each chunk is entered when
the step computes it, so that others find it. Then tokens are decoded one by one, and the window slides every so many.
A decoded token needs nothing of the cache as long as its page has room, no window is due to slide, no state is to be
kept, and every pool has a page.
"""

from __future__ import annotations

from reference.dialects.sglang.operations import perform_at
from reference.dialects.sglang.pools import available
from reference.dialects.sglang.pools import empty as empty_pools
from reference.dialects.sglang.records import UNBOUNDED, Cache, Code, Request, Status, ceil
from reference.dialects.sglang.requests import kept_state, pages_of, slides
from reference.language import Column, Settings, Text
from reference.replay import Answer, Live, Phase, Replay, empty

TEXT = Text(__name__)


class Rhythm(Settings):
    """Distances in tokens, of which the engine's are configured.

    Attributes:
      slide: tokens between two slides of a window. grid: between states that a prompt's passes keep. track: between
      states that decoded tokens keep. pages: pages of all pools, and states.
    """

    slide: int
    grid: int
    track: int
    pages: int


class SGLangReplay(Replay):
    """A replay over SGLang's cache, whose first operation is the one that is asked; its payload are the trace's keys.

    Attributes:
      slot: of a request, its slot in the cache. branch: where the tree's prefix of it goes on without a state.
      code: the operation that was asked last.
    """

    cache: Cache
    rhythm: Rhythm
    slot: Column[Live, int]
    branch: Column[Live, int]
    code: int

    def operate(self, live: Live) -> int:
        """Asks for the next operation of the phase."""
        c = self.cache
        request, result = c.requests[self.slot[live] + 2], c.results[1]
        if self.phase == Phase.GROW or self.phase == Phase.FINISH:
            self.catch_up(live, request)
        code = self.next_code(live, request)
        self.code = code
        self.fill_in(live, request, code)
        perform_at(c, 1, code)
        if code == Code.ABORT:
            return Answer.REFUSED if self.phase == Phase.ADMIT else Answer.DONE
        if result.status == Status.NO_ROOM:
            return Answer.MORE if self.phase == Phase.ADMIT else Answer.REFUSED
        if result.status != Status.OK:
            return Answer.FAILED
        if code == Code.ADMIT:
            self.hit = result.hit * c.config.page
            self.new = min(live.tokens - self.hit, self.budget)
            self.branch[live] = result.full_hit * c.config.page // self.rhythm.grid * self.rhythm.grid
            return Answer.MORE
        if code == Code.EXTEND:
            live.undisturbed = self.undisturbed_until(live, request)
        if code in (Code.SLIDE, Code.DECODE):
            if request.length < live.computed + self.new:
                return Answer.MORE
            live.undisturbed = self.undisturbed_until(live, request)
        return Answer.DONE

    def next_code(self, live: Live, request: Request) -> int:
        """The next operation of the phase."""
        if self.phase == Phase.ADMIT:
            if not self.midway:
                return Code.ADMIT
            return Code.EXTEND if self.code == Code.ADMIT else Code.ABORT
        if self.phase == Phase.GROW:
            if live.computed < live.came:
                return Code.EXTEND
            slid = self.midway and self.code == Code.SLIDE
            due = slides(self.cache, request, request.length, self.rhythm.slide)
            return Code.SLIDE if due and not slid else Code.DECODE
        if self.phase == Phase.ENTER:
            return Code.CHECKPOINT
        return Code.FINISH if self.phase == Phase.FINISH else Code.ABORT

    def catch_up(self, live: Live, request: Request) -> None:
        """Notes the decoded tokens that needed nothing of the cache; at most one page was filled by them."""
        c = self.cache
        page = pages_of(c, request.tokens)
        if live.computed > request.length:
            if page < pages_of(c, live.computed):
                request.chain[page] = c.payload[live.arrival.first_key + page]
            request.length, request.tokens = live.computed, live.computed

    def fill_in(self, live: Live, request: Request, code: int) -> None:
        """Fills in the operation."""
        c, start, length, track = self.cache, live.arrival.first_key, 0, 0
        count = pages_of(c, live.tokens)
        if code == Code.EXTEND:
            before = self.hit if self.phase == Phase.ADMIT else live.computed
            length = before + self.new
            if c.config.tracked:
                track = kept_state(before, length, self.branch[live], self.rhythm.grid)
        if code == Code.DECODE:
            page = pages_of(c, request.tokens)
            start, count = start + page, pages_of(c, request.tokens + 1) - page
            track = int(c.config.tracked and (request.length + 1) % self.rhythm.track == 0)
        op = c.operations[1]
        op.slot, op.tokens, op.start, op.count = self.slot[live], live.tokens, start, count
        op.length, op.track, op.every, op.priority = length, track, self.rhythm.slide, 0

    def undisturbed_until(self, live: Live, request: Request) -> int:
        """Tokens up to which a request needs nothing of the cache: none before it decodes; then up to its page's end,
        to where its window slides next, and to before where a state of it is kept next."""
        c = self.cache
        if request.length < live.came:
            return 0
        until = ceil(request.length, c.config.page) * c.config.page
        if c.config.window:
            until = min(until, c.config.window + request.slid * c.config.page + self.rhythm.slide)
        if c.config.tracked:
            until = min(until, (request.length // self.rhythm.track + 1) * self.rhythm.track - 1)
        return min(until, UNBOUNDED)

    def needs(self, live: Live, new: int) -> bool:
        """False as long as nothing is due, and every pool has a page, so that nothing has to leave."""
        c = self.cache
        room = available(c.full) > 0 and (not c.config.window or available(c.swa) > 0)
        return not room or live.computed + new > live.undisturbed

    def enters(self, live: Live) -> bool:
        """True of a prompt's chunk."""
        return live.computed < live.came

    def in_use(self) -> int:
        """Pages, and states, that are neither free nor the tree's alone."""
        c, held = self.cache, self.rhythm.pages
        for pool in (c.full, c.swa, c.states):
            held -= available(pool) + pool.idle
        return held


def begin(r: SGLangReplay, full: int, window: int, states: int, nodes: int, lives: int) -> None:
    """Nothing is cached and nothing has arrived yet: pages, states and records of nodes as `pools.empty` takes them;
    `lives` requests may run or be about to."""
    empty_pools(r.cache, full, window, states, nodes)
    empty(r, lives)
    for slot in range(lives):
        r.slot[r.lives[slot + 2]] = slot
