"""A replay under RTP-LLM's rules: what a request asks of the cache, and why a hit ended where it did.

A request gets blocks for its whole prompt at once, and for tokens that follow as they come; it enters the cache when it
ends. RTP-LLM asks at every step; what cannot change anything is not asked.
"""

from __future__ import annotations

import enum

from reference.dialects.rtp_llm.cache import lent
from reference.dialects.rtp_llm.operations import perform_at
from reference.dialects.rtp_llm.records import Cache, Code, Key, Kind, Request, Status, ceil
from reference.language import Array, Column, Settings, Text
from reference.replay import Answer, Arrival, Live, Phase, Replay, empty

TEXT = Text(__name__)


class Reason(enum.IntEnum):
    """Reason why a group had no more of a prefix that was computed: nothing was; it had all; evicted; never kept;
    never shared; nothing is cached at all."""

    NOTHING, HAD, EVICTED, RETIRED, NOT_SHARED, CACHING_OFF = range(6)


class Options(Settings):
    """Options of a replay.

    Attributes:
      caching: whether requests reuse and are reused. reserve: tokens of drafts and one, 0 without speculation.
      diagnoses: whether to find out why hits ended.
    """

    caching: int
    reserve: int
    diagnoses: int


class RtpReplay(Replay):
    """A replay over RTP-LLM's cache, whose first operation is the one that is asked; its payload are the trace's keys.

    Attributes:
      slot: of a request, its slot in the cache. known: the request that has the slot. code: the operation asked last.
      history: of a key, whether a request entered it, and a bit for each group in which it had a block then.
      verdicts: how many allocations ended in each status, admissions first, then growth.
      taken, duplicates: blocks that the cache took, and that it did not because another one was there.
      cached_peak: most blocks that it held when a step was recorded.
    """

    cache: Cache
    options: Options
    slot: Column[Live, int]
    known: Column[Live, Arrival]
    history: Column[Key, int]
    verdicts: Array[int]
    code: int
    taken: int
    duplicates: int
    cached_peak: int

    def operate(self, live: Live) -> int:
        """Asks for the next operation of the phase."""
        c, result = self.cache, self.cache.results[1]
        request = c.requests[self.slot[live] + 1]
        code = self.next_code(live, request)
        self.code = code
        looked_up = code == Code.MALLOC and self.phase == Phase.ADMIT and live.arrival.preemptions == 0
        if self.options.diagnoses and looked_up:
            diagnose(self, live.arrival)
        if code == Code.INSERT:
            note_entered(self, request)
        self.fill_in(live, request, code)
        c.said = 0
        perform_at(c, 1, code)
        status = result.status
        if code == Code.MALLOC:
            return self.allocated(live, status, result.value)
        if status != Status.OK:
            return Answer.FAILED
        if code == Code.REQUEST:
            self.known[live] = live.arrival
        ends = code == Code.DROP and self.phase != Phase.ADMIT
        return Answer.DONE if ends else Answer.MORE

    def allocated(self, live: Live, status: int, reused: int) -> int:
        """Answer to an allocation, which is counted."""
        if status > Status.INTERNAL_ERROR:
            return Answer.FAILED
        admits = self.phase == Phase.ADMIT
        place = status if admits else status + Status.INTERNAL_ERROR + 1
        self.verdicts[place] += 1
        if status != Status.OK:
            return Answer.NEVER if admits and status == Status.PERMANENT else Answer.REFUSED
        if admits:
            self.hit, self.new = reused, min(live.tokens - reused, self.budget)
        live.undisturbed = live.tokens if admits else same_slots(self, live.tokens)
        return Answer.DONE

    def next_code(self, live: Live, request: Request) -> int:
        """The next operation of the phase."""
        code = self.code if self.midway else Code.END
        if self.phase == Phase.ADMIT:
            if code == Code.END and (not request.live or self.known[live] is not live.arrival):
                return Code.DROP if request.live else Code.REQUEST
            return Code.REQUEST if code == Code.DROP else Code.MALLOC
        if self.phase == Phase.GROW:
            return Code.APPEND if live.tokens > request.tokens else Code.MALLOC
        if code == Code.FREE:
            return Code.DROP
        inserts = self.phase == Phase.FINISH and self.options.caching and code == Code.END
        return Code.INSERT if inserts else Code.FREE

    def fill_in(self, live: Live, request: Request, code: int) -> None:
        """Fills in the operation."""
        c, before, whole = self.cache, 0, 0
        if code == Code.APPEND:
            before, whole = request.tokens, request.whole
        op = c.operations[1]
        op.slot, op.sequences, op.reserve = self.slot[live], 1, self.options.reserve
        op.tokens, op.count = live.tokens - before, live.tokens // c.config.block - whole
        op.start = live.arrival.first_key + whole
        op.reuse, op.device_cache = self.options.caching, self.options.caching

    def needs(self, live: Live, new: int) -> bool:
        """False as long as a request has the slots, those of its reserve too, and the whole blocks that it had."""
        return live.tokens > live.undisturbed

    def enters(self, live: Live) -> bool:
        """False: requests enter the cache when they end."""
        return False

    def in_use(self) -> int:
        """Blocks of all pools that a request holds; notes, too, how many the cache has."""
        held = 0
        for n in range(1, (self.cache.config.groups if self.cache.config.apart else 1) + 1):
            held += self.cache.pools[n].held
        self.cached_peak = max(self.cached_peak, self.taken - self.cache.evictions)
        return held


def begin(r: RtpReplay, lives: int) -> None:
    """Nothing has arrived yet; `lives` requests may run or be about to."""
    empty(r, lives)
    for slot in range(lives):
        r.slot[r.lives[slot + 2]] = slot


def same_slots(r: RtpReplay, tokens: int) -> int:
    """Tokens up to which a request has the slots, those of its reserve too, and the whole blocks that it has now."""
    block, reserve = r.cache.config.block, r.options.reserve
    until = min((tokens // block + 1) * block - 1, ceil(tokens, block) * block)
    return min(until, ceil(tokens + reserve, block) * block - reserve)


def note_entered(r: RtpReplay, request: Request) -> None:
    """Notes what entering a request's whole blocks is about to change."""
    c, row = r.cache, request.rows[0]
    for at in range(row.count - (not row.aligned)):
        key = row.keys[at]
        bits = r.history[key] | 1
        for g in range(c.config.groups):
            ids = row.groups[g]
            block = ids.blocks[at] if at < ids.length else 0
            if block > 0:
                bits = bits | 2 << g
            held = key.blocks[g] if key.cached else 0
            r.taken += held == 0 and lent(c, row, at, g) > 0
            r.duplicates += block > 0 and held > 0 and held != block
        r.history[key] = bits


def diagnose(r: RtpReplay, arrival: Arrival) -> None:
    """Records how far a request's blocks were computed, and what each group lacks of a hit up to there: of full groups
    the first missing block counts, of the others the last one."""
    c, computed = r.cache, 0
    asked = arrival.asked // c.config.block if r.options.caching else 0
    while computed < asked and r.history[c.payload[arrival.first_key + computed]] & 1:
        computed += 1
    arrival.computed = computed * c.config.block
    for g in range(c.config.groups):
        group = c.groups[g + 1]
        at = 0 if group.kind == Kind.FULL else max(computed - 1, 0)
        while at < computed and has(c, c.payload[arrival.first_key + at], g):
            at += 1
        reason = Reason.HAD
        if computed == 0:
            reason = Reason.NOTHING
        elif at < computed:
            kept = r.history[c.payload[arrival.first_key + at]] & 2 << g
            reason = Reason.EVICTED if kept else Reason.RETIRED
        if group.kind != Kind.FULL and not group.votes:
            reason = Reason.NOT_SHARED
        arrival.reasons[g] = reason if r.options.caching else Reason.CACHING_OFF


def has(c: Cache, key: Key, g: int) -> bool:
    """True if a group has a block under a key."""
    return key.cached > 0 and key.blocks[g] > 0
