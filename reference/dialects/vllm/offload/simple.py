"""The simpler second tier: a second pool of blocks with the GPU's own rules, behind vLLM's `SimpleCPUOffloadConnector`.

The tier is a cache of the same groups. A lookup asks it for what follows the GPU's hit, by the rules of hits, and pins
what it finds until the request has blocks. A step stores blocks that earlier steps computed and that have a key, as
many as the tier has free; the rest of a request is stored when it ends. Both sides of a transfer are referenced while
it goes on, so that nothing has to be flushed. Where it is lazy, a step stores what the GPU is about to hand out
instead, whosever it was. vLLM 0.33 `SimpleCPUOffloadScheduler`, in host memory.
"""

from __future__ import annotations

from reference.dialects.vllm.finding import look_up
from reference.dialects.vllm.offload.copies import (
    Copies,
    Copying,
    Saved,
    TierCache,
    add,
    drop_owners,
    free_copies,
    give_back,
    hold,
    join,
    let_go,
    new_copies,
    own,
)
from reference.dialects.vllm.offload.lives import Live
from reference.dialects.vllm.offload.records import Mail, Rows
from reference.dialects.vllm.offload.telling import hand_out_copies, hand_over, tell_ended
from reference.dialects.vllm.pool import drop_keys, enter, entry_of, primary, release, touch
from reference.dialects.vllm.records import NONE, Block, Kind, at_column, ceil
from reference.dialects.vllm.registering import cacheable
from reference.language import Text, clause

TEXT = Text(__name__)


class Simple(Copying):
    """Requests, the GPU's cache, and a tier of blocks behind it."""

    def mail(self) -> Mail:
        """Things that the tier is told of."""
        return self.told_of

    def arrive(self, live: Live, load_limit: int, store_limit: int) -> None:
        """A request comes; limits do not count here."""
        self.saved[live.slot + 2].live = live

    def know(self, live: Live) -> None:
        """The tier looks at the cache's own numbers."""

    def match(self, live: Live, local: int) -> tuple[int, bool]:
        """Tokens beyond a request's hit on the GPU that can be loaded; a load takes longer than the step, always."""
        saved = self.saved[live.slot + 2]
        unpin(self, saved)
        found = find(self, live, saved, local)
        return found, found > 0

    def allocated(self, live: Live, external: int) -> None:
        """A request was given blocks; if tokens are to be loaded into them, the load waits for the step's end."""
        saved, width = self.saved[live.slot + 2], self.cache.config.width
        if not saved.known and not self.choices.lazy:
            saved.known, saved.finished, saved.stores = 1, 0, 0
            for at in range(width):
                saved.held[at], saved.cursors[at] = 0, 0
        if external > 0:
            saved.load = collect_load(self, live, saved, external)
            self.loads.put(saved)
        unpin(self, saved)

    def finish(self, live: Live, aborted: int) -> None:
        """A request has finished: what it computed and has not stored is stored with the next step."""
        saved = self.saved[live.slot + 2]
        if saved.known:
            made = new_copies(self, 1)
            select(self, saved, made, 1)
            add_tail(self, saved, made)
            if made.count > 0:
                hold(self, made)
                if self.kept is None:
                    self.kept = made
                else:
                    self.kept_last.after = made
                self.kept_last = made
            else:
                free_copies(self, made)
        unpin(self, saved)
        if saved.load is not None and saved.load.number == 0:
            self.loads.remove(saved)
            give_back(self, saved.load)
            saved.load = NONE
        if saved.known:
            saved.finished = 1
            forget(self, saved)

    def order(self) -> None:
        """A step is scheduled: one store of all that is new, and the loads."""
        handed = hand_over(self)
        hand_out_copies(self)
        tell_ended(self)
        self.before = self.number
        made = new_copies(self, 1)
        self.store = NONE
        self.flushes = 0
        for n in range(1, self.told_of.count + 1):
            self.flushes = self.flushes or self.told_of.rows[n].preempted
        if self.choices.lazy:
            walk(self, made)
        else:
            collect(self, made, handed)
        while self.kept is not None:
            kept = self.kept
            self.kept = kept.after
            join(self, made, kept)
        if made.count > 0:
            self.number += 1
            made.number, made.left, self.store = self.number, self.choices.workers, made
            owner = made.owners
            while owner is not None:
                owner.saved.stores += 1
                owner = owner.next
        else:
            free_copies(self, made)
        while self.loads.oldest() is not self.loads.ends:
            saved = self.loads.oldest()
            self.loads.remove(saved)
            self.number += 1
            saved.load.number, saved.load.left = self.number, self.choices.workers

    def loaded(self, live: Live) -> None:
        """Workers have loaded what a request waits for."""
        saved = self.saved[live.slot + 2]
        give_back(self, saved.load)
        saved.load = NONE

    def report(self, job: int, workers: int) -> None:
        """Workers have finished their parts of a job; of loads that counts for nothing."""
        made = self.copies[job]
        if made.writes:
            made.left -= workers
            if made.left == 0:
                stored(self, made)

    def empty(self) -> bool:
        """Empties the tier if no transfer goes on, which then keeps nothing; requests that run store no more."""
        while self.pins.oldest() is not self.pins.ends:
            unpin(self, self.pins.oldest())
        while self.kept is not None:
            kept = self.kept
            self.kept = kept.after
            give_back(self, kept)
        while self.loads.oldest() is not self.loads.ends:
            saved = self.loads.oldest()
            self.loads.remove(saved)
            give_back(self, saved.load)
            saved.load = NONE
        going = False
        for n in range(1, self.most_copies + 1):
            made = self.copies[n]
            if made.number > 0:
                going, made.abandoned = True, 1
                drop_owners(self, made)
        for n in range(1, self.cache.config.pool + 1):
            self.reading[self.cache.blocks[n]] = 0
        self.looked_at = NONE
        for n in range(1, self.cache.slots + 1):
            self.saved[n + 1].known = 0
        return not going and forget_keys(self.tier)


# Lookups.


def find(s: Simple, live: Live, saved: Saved, local: int) -> int:
    """Tokens that the tier has of a request after those of its hit on the GPU; their blocks are held."""
    request, asked, tier = live.request, s.tier.requests[live.slot + 1], s.tier
    first, most = local // s.cache.config.hash, request.tokens - 1 - local
    alone = False
    for g in range(1, s.cache.config.width + 1):
        group = s.cache.groups[g]
        alone = alone or (group.kind == Kind.CHUNK and local % group.unit > 0)
    if request.keys <= first or most <= 0 or alone:
        return 0
    asked.keys, asked.tokens, asked.prompt = request.keys - first, request.tokens - local, request.prompt
    for at in range(asked.keys):
        asked.chain[at] = request.chain[first + at]
    look_up(tier, asked, tier.results[1], most, 0)
    hit = tier.results[1].value
    if hit == 0:
        return 0
    clause("simple/found", "SimpleCPUOffloadScheduler.get_num_new_matched_tokens", "the tier has what follows a hit")
    for g in range(1, tier.config.width + 1):
        row = asked.rows[g]
        for column in range(row.first_found, row.found):
            if row.blocks[column] is not None:
                touch(tier, row.blocks[column])
    saved.pinned, saved.local = 1, local
    s.pins.put(saved)
    return hit


def unpin(s: Simple, saved: Saved) -> None:
    """The tier's blocks that were found for a request are held no more."""
    if saved.pinned:
        saved.pinned = 0
        s.pins.remove(saved)
        asked, last = s.tier.requests[saved.live.slot + 1], s.tier.free.ends
        for g in range(1, s.tier.config.width + 1):
            row = asked.rows[g]
            for column in range(row.first_found, row.found):
                if row.blocks[column] is not None:
                    last = release(s.tier, row.blocks[column], last)


def collect_load(s: Simple, live: Live, saved: Saved, external: int) -> Copies:
    """Copies of what was found for a request to the blocks that it was given."""
    clause("simple/load", "SimpleCPUOffloadScheduler.update_state_after_alloc", "a load waits for the step's end")
    made, asked = new_copies(s, 0), s.tier.requests[live.slot + 1]
    for g in range(1, s.cache.config.width + 1):
        group, row, found = s.cache.groups[g], live.request.rows[g], asked.rows[g]
        for column in range(found.first_found, min(found.found, ceil(external, group.size)) if saved.pinned else 0):
            block = found.blocks[column]
            if block is not None:
                add(s, made, at_column(group, row, saved.local // group.size + column), block)
    pair = made.first
    while pair is not None:
        touch(s.tier, pair.tier)
        if pair.gpu is not None:
            touch(s.cache, pair.gpu)
        pair = pair.next
    return made


# Stores.


def is_new(s: Simple, block: Block) -> bool:
    """True if a block has a key, which the tier does not know, and is not on its way."""
    if block is None or s.reading[block] > 0:
        return False
    entry = primary(s.cache, block)
    return entry is not None and s.twin[entry].first is None


def select(s: Simple, saved: Saved, made: Copies, ends: int) -> int:
    """Blocks of a request that are computed and not in the tier, as many as it has free; how many. Of a window's blocks
    that were given up, those that the GPU still knows by their key. `ends`: of the blocks that it has now."""
    c, request, free, found = s.cache, saved.live.request, s.tier.free.count, 0
    for g in range(1, c.config.width + 1):
        saved.passed[g - 1] = 0
    for g in range(1, c.config.width + 1):
        group, row = c.groups[g], request.rows[g]
        held = saved.held[g - 1]
        if ends:
            held = min(row.length, ceil(request.computed, group.size))
        ready = min(held, cacheable(s.tier, s.tier.groups[g], request.computed) // group.size)
        if group.kind == Kind.STATE or found >= free:
            ready = 0
        for column in range(saved.cursors[g - 1], ready):
            block = at_column(group, row, column) if ends else saved.blocks[column * c.config.width + g - 1]
            if block is None and column < request.keys // group.scale:
                block = entry_of(c, request, group, (column + 1) * group.scale - 1).first
            if is_new(s, block):
                if found >= free:
                    break
                add(s, made, block, NONE)
                found += 1
            saved.passed[g - 1] += 1
    return found


def add_tail(s: Simple, saved: Saved, made: Copies) -> None:
    """The block of full attention that a prompt's last whole key ends inside, if it has that key, the tier has not, and
    there is room. Of several groups, the first one's alone."""
    c, request = s.cache, saved.live.request
    group, end = c.groups[s.choices.full], request.prompt // c.config.hash * c.config.hash
    if s.choices.partial and end % group.size > 0 and end <= request.computed and made.count < s.tier.free.count:
        block = at_column(group, request.rows[s.choices.full], end // group.size)
        entry, there = entry_of(c, request, group, end // c.config.hash - 1), False
        if block is not None and s.reading[block] == 0 and s.twin[entry].first is None:
            for part in range(c.config.parts):
                there = there or block.known[part] is entry
        pair = made.first
        while pair is not None:
            there = there and pair.gpu is not block
            pair = pair.next
        if there:
            clause("simple/tail", "SimpleCPUOffloadScheduler._prepare_eager_store_specs", "a prompt's tail is stored")
            add(s, made, block, NONE)


def collect(s: Simple, made: Copies, handed: int) -> None:
    """Blocks that a step stores, states that are handed over first; and the requests whose they are."""
    mail, width = s.told_of, s.cache.config.width
    for n in range(1, mail.count + 1):
        rows = mail.rows[n]
        if rows.preempted or rows.finished:
            s.saved[rows.request + 1].refused = 1
    for n in range(1, handed + 1):
        saved, block = s.saved[mail.handing[n].request + 1], s.cache.blocks[mail.handing[n].block]
        if saved.known and not saved.finished and not saved.refused and is_new(s, block) and s.tier.free.count > 0:
            clause("simple/states", "SimpleCPUOffloadScheduler.build_connector_meta", "states are stored first")
            add(s, made, block, NONE)
            hold(s, made)
            own(s, made, saved)
    for n in range(1, mail.count + 1):
        rows = mail.rows[n]
        saved = s.saved[rows.request + 1]
        saved.refused = 0
        if rows.preempted and saved.known:
            for at in range(width):
                saved.held[at], saved.cursors[at] = 0, 0
    for turn in range(3):  # those that run for the first time, those that went on, those that came back
        for n in range(1, mail.count + 1):
            rows = mail.rows[n]
            saved = s.saved[rows.request + 1]
            mine = 1
            if rows.whole:
                mine = 2 if saved.live.preempted else 0
            if rows.tokens > 0 and saved.known and not saved.finished and mine == turn:
                note_rows(s, saved, rows)
                if select(s, saved, made, 0) > 0:
                    hold(s, made)
                    own(s, made, saved)
                for at in range(width):
                    saved.cursors[at] += saved.passed[at]


def note_rows(s: Simple, saved: Saved, rows: Rows) -> None:
    """Takes note of a request's new blocks."""
    width, place = s.cache.config.width, rows.start
    for at in range(width):
        if rows.whole:
            saved.held[at] = 0
        column = saved.held[at]
        for turn in range(place, place + rows.counts[at]):
            saved.blocks[column * width + at] = s.cache.blocks[s.told_of.given[turn]]
            column += 1
        place += rows.counts[at]
        saved.held[at] = column


def walk(s: Simple, made: Copies) -> None:
    """Blocks that a step stores lazily: those at the front of the GPU's free ones that the tier lacks, if it has
    room."""
    free, room, left = s.cache.free, s.tier.free.count, s.choices.near
    block = free.oldest()
    if not s.choices.lazy_walk_goes_on:
        left = min(left, s.tier.config.pool)  # what is stored is not to push itself out
    elif s.looked_at is not None and s.looked_at.refs == 0:
        clause("lazy-walk-goes-on", "SimpleCPUOffloadScheduler._prepare_lazy_store_specs", "defect: a walk goes on")
        block = free.newer[s.looked_at]
    else:
        s.looked_at = NONE
    while left > 0 and made.count < room and block is not free.ends:
        s.looked_at = block
        if is_new(s, block):
            add(s, made, block, NONE)
        block = free.newer[block]
        left -= 1
    hold(s, made)


def stored(s: Simple, made: Copies) -> None:
    """A store has ended: the tier has what it wrote, under the keys that the GPU has for it now."""
    clause("simple/stored", "SimpleCPUOffloadScheduler._process_store_completion")
    pair = made.first
    while pair is not None and not made.abandoned:
        s.reading[pair.gpu] = 0
        for part in range(s.cache.config.parts):
            entry = pair.gpu.known[part]
            if entry is not None:
                enter(s.tier, pair.tier, part, s.twin[entry])
        pair = pair.next
    let_go(s, made)
    if s.choices.lazy and not s.choices.lazy_store_renews:
        last, other = s.cache.free.ends, made.first
        while other is not None:
            if other.gpu.refs == 0:
                s.cache.free.remove(other.gpu)
                s.cache.free.put_behind(other.gpu, s.cache.free.newer[last])
                last = other.gpu
            other = other.next
    owner = made.owners
    while owner is not None:
        owner.saved.stores -= 1
        forget(s, owner.saved)
        owner = owner.next
    free_copies(s, made)


def forget(s: Simple, saved: Saved) -> None:
    """A request that has finished, and whose stores have, is the tier's no more."""
    if saved.finished and saved.stores == 0:
        saved.known = 0


def forget_keys(tier: TierCache) -> bool:  # type: ignore[valid-type]
    """Forgets every key, unless a block is in use."""
    if tier.free.count < tier.config.pool:
        return False
    for n in range(1, tier.config.pool + 1):
        drop_keys(tier, tier.blocks[n], NONE)
    return True
