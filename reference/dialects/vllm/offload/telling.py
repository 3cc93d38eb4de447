"""Things that vLLM's scheduler asks its cache, and tells a second tier of: blocks that a step hands out, states that
are handed over, requests that finished.
"""

from __future__ import annotations

from reference.dialects.vllm.offload.lives import Live, Serving
from reference.dialects.vllm.operations import perform
from reference.dialects.vllm.pool import entry_of, is_cached
from reference.dialects.vllm.records import Code, Told, at_column
from reference.language import Text

TEXT = Text(__name__)


def ask(s: Serving, live: Live, code: int, amount: int) -> int:
    """Asks the GPU's cache for an operation of a request with one number; its `Status`."""
    c, op = s.cache, s.cache.operations[1]
    op.slot, op.amount, op.count, op.keep, op.prompt, op.in_flight = 0, amount, 0, 0, 0, 0
    if live is not None:
        op.slot = live.slot
    op.live, op.reports, op.named = 1, 0, 0
    if code == Code.COPIES:
        op.live = 0
    result = c.results[1]
    c.listed, c.told, result.start = 0, 0, 0
    result.value, result.longer, result.lags, result.copies = 0, 0, 0, 0
    return perform(c, op, result, code)


def tell(s: Serving, live: Live, whole: int) -> None:
    """Tells the tier of blocks that a request was given, or of all that it has."""
    s.know(live)
    c, mail, result = s.cache, s.mail(), s.cache.results[1]
    mail.count += 1
    rows, place = mail.rows[mail.count], mail.filled
    rows.request, rows.start, rows.whole, rows.tokens = live.slot + 1, place, whole, live.scheduled
    rows.finished, rows.preempted = 0, 0
    for g in range(1, c.config.width + 1):
        row, begun = live.request.rows[g], place
        first, last = 0, row.length
        if not whole:
            first, last = result.first[g], result.end[g]
            for n in range(c.pending - result.copies + 1, c.pending + 1):
                if c.copies[n].adopted and c.copies[n].group is c.groups[g]:
                    mail.given[place] = s.numbers_of[c.copies[n].target]
                    place += 1
        for column in range(first, last):
            block = at_column(c.groups[g], row, column)
            mail.given[place], mail.hashed[place] = s.numbers_of[block], 0
            if whole and block is not None:
                mail.hashed[place] = is_cached(c, block)
            place += 1
        rows.counts[g - 1] = place - begun
    rows.told = whole or place > mail.filled
    mail.filled = place


def hand_over(s: Serving) -> int:
    """Tells the tier of states that are handed over, those of a request together; how many there are."""
    c, mail, count = s.cache, s.mail(), 0
    if c.config.offering:
        nobody: Live = None  # type: ignore[assignment]
        ask(s, nobody, Code.OFFLOADS, 0)
        for n in range(1, c.told + 1):
            new = c.news[n].kind == Told.OFFER
            for before in range(1, n):
                new = new and c.news[before].request is not c.news[n].request
            for at in range(n, c.told + 1 if new else n):
                told = c.news[at]
                if told.request is c.news[n].request:
                    count += 1
                    handed, live = mail.handing[count], s.lives_of[told.request]
                    s.know(live)
                    handed.request, handed.block = live.slot + 1, s.numbers_of[told.block]
                    handed.index = told.group.place - 1
                    end = told.request.keys
                    while end > 1 and entry_of(c, told.request, told.group, end - 1) is not told.entry:
                        end -= 1
                    handed.tokens = end * c.config.hash
    return count


def hand_out_copies(s: Serving) -> int:
    """Tells the tier of blocks that others are copied to in this step; how many there are."""
    c, mail, count = s.cache, s.mail(), s.cache.pending
    for n in range(1, count + 1):
        mail.given[mail.filled + n - 1] = s.numbers_of[c.copies[n].target]
    nobody: Live = None  # type: ignore[assignment]
    ask(s, nobody, Code.COPIES, 0)
    return count


def tell_ended(s: Serving) -> None:
    """Tells the tier of requests that finished since the last step, by their names, and of those that were
    preempted."""
    rank, going = -1, True
    while going:
        first: Live = None  # type: ignore[assignment]
        for n in range(1, s.last + 1):
            live = s.lives[n]
            if live.ended and live.rank > rank and (first is None or live.rank < first.rank):
                first = live
        going = first is not None
        if first is not None:
            rank = first.rank
            tell_of(s, first, 1, 0)
    for n in range(1, s.last + 1):
        if s.lives[n].returned:
            tell_of(s, s.lives[n], 0, 1)


def tell_of(s: Serving, live: Live, finished: int, preempted: int) -> None:
    """Tells the tier of a request without blocks."""
    mail = s.mail()
    mail.count += 1
    rows = mail.rows[mail.count]
    rows.request, rows.told, rows.whole, rows.tokens = live.slot + 1, 0, 0, 0
    rows.finished, rows.preempted, rows.start = finished, preempted, mail.filled
