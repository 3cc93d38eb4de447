"""Requests: what they take from the tree, what is theirs alone, and when it becomes the tree's.

The first `protected` pages of a request's row are the tree's, which the request holds by a lock; the others are its
own. After each chunk of its prompt, and at its end, it enters what it has computed, and the tree's pages take the place
of its own. So a prompt is shared as soon as its first chunk is computed.

After SGLang 0.5.23, `unified_radix_cache.py` (`checkpoint_into_tree`), `common.py` and `allocation.py`.
"""

from __future__ import annotations

from reference.dialects.sglang.holding import lock, unlock
from reference.dialects.sglang.pools import free_own, free_state, free_window, lengthen
from reference.dialects.sglang.radix import insert, match
from reference.dialects.sglang.records import Cache, Node, Operation, Request, Result, ceil
from reference.language import Text, clause

TEXT = Text(__name__)

STATE_CHUNK = 64
"""Tokens of a chunk of the kernel that computes states (`FLA_CHUNK_SIZE`)."""


def pages_of(c: Cache, tokens: int) -> int:
    """Whole pages of a key of so many tokens."""
    return max(tokens - c.config.eagle, 0) // c.config.page


def arrive(c: Cache, op: Operation, request: Request, result: Result, admits: int) -> None:
    """The longest cached prefix of a request's tokens; if it is admitted it holds that. Its last token is computed in
    any case."""
    node, length, end = match(c, request, pages_of(c, op.tokens - admits))
    result.hit, result.full_hit = length, end
    if end == 0:
        clause("nothing-cached", "UnifiedTreeCore.match_prefix", "nothing of what is asked for is cached")
    if length < end:
        clause(
            "not-resumable", "TreeComponent.create_match_validator", "more is cached than every component can resume"
        )
    if admits:
        clause("admit", "Req.init_next_round_input", "a request comes, and holds what is cached of it")
        request.running, request.ran = 1, 0
        request.tokens, request.prompt, request.priority = op.tokens, op.tokens, op.priority
        request.length, request.protected = length * c.config.page, length
        request.entered, request.slid, request.branch = 0, 0, 0
        request.own, request.kept_first, request.kept_second, request.turn = 0, 0, 0, 0
        request.tracked, request.tracked_before = 0, 0
        if c.config.window and not c.config.states and end > length:
            # Beside states a window has no say in where an insert ends: a state stands for its length alone.
            request.branch = end
        hold(c, request, node, 0)


def hold(c: Cache, request: Request, node: Node, start: int) -> None:
    """A request holds a node, and its row has the tree's pages up to there."""
    for at in range(start, node.end):
        request.row[at] = request.chain[at].page
    lock(c, request, node)
    request.protected = node.end


def grow(c: Cache, request: Request, length: int, track: int, decodes: int) -> int:
    """Pages for a request's tokens up to a length, of which a decoded one may come; whether it got them.

    Args:
      c: the cache, in which room was made.
      request: the request.
      length: tokens of it that shall have slots.
      track: length at which the pass keeps a state; 0 for none.
      decodes: whether the last of them is decoded.
    """
    clause("grow", "alloc_for_extend")
    granted = lengthen(c, request, length, decodes)
    if granted:
        request.ran = 1
        request.tokens = max(request.tokens, length)
        if c.config.states and track > 0:
            clause("keep-state", "Req.mamba_next_track_idx", "a pass keeps the state of a length that it passed")
            # A chunk of a prompt is never beyond the end: only decoded tokens leave a state behind to fall back to.
            request.tracked_before = request.tracked if decodes else 0
            request.tracked, request.turn = track, 1 - request.turn
    return granted


def slides(c: Cache, request: Request, length: int, every: int) -> bool:
    """True if a request's window has passed `every` tokens, or more, whose pages it still has."""
    return c.config.window > 0 and length - c.config.window >= request.slid * c.config.page + every


def slide(c: Cache, request: Request, length: int, every: int) -> None:
    """Frees window pages of a request's own that a query at `length` does not read, but for whole pages' sake."""
    if slides(c, request, length, every):
        clause("slide", "UnifiedRadixCache.evict_sliding_windows", "a request frees pages behind its window")
        start = max(request.slid, request.protected)
        floor = length - ceil(max(c.config.window, c.config.page), c.config.page) * c.config.page
        if c.config.states and request.tracked > 0:
            # The next match ends at the state that was kept, and reads a window there.
            floor = min(floor, request.tracked - c.config.window)
        end = max(start, max(floor, 0) // c.config.page)
        request.slid = start
        if end > start:
            free_window(c, request, start, end)
            request.slid = end


def enter(c: Cache, request: Request, length: int, runs: int) -> None:
    """Enters what a request has computed, takes the tree's pages for its own, and holds what it ends on."""
    clause("enter", "UnifiedRadixCache.checkpoint_into_tree")
    # The prefix that a window kept this request from using ends here, so that the next one can use it.
    branches = request.branch > request.protected and request.branch * c.config.page + c.config.eagle <= length
    if branches:
        length = request.branch * c.config.page + c.config.eagle
    state = 0
    if c.config.states:
        length, state = to_enter(c, request, length, runs)
    if runs:
        slide(c, request, length - c.config.eagle - 1, 1)
    if length > 0:
        node, took = enter_pages(c, request, pages_of(c, length), state)
        if c.config.states:
            settle_state(c, request, state, took, runs)
        unlock(c, request)
        hold(c, request, node, request.protected)
        if branches:
            request.branch = 0
            if runs:
                slide(c, request, request.length - c.config.eagle - 1, 1)
    request.tracked, request.tracked_before = 0, 0


def enter_pages(c: Cache, request: Request, pages: int, state: int) -> tuple[Node, int]:
    """Enters a request's pages, and the state after them; the node that ends them, and whether it took that.

    Where full attention is all there is, a prompt is parted from what was generated after it, and kept longer: it is
    likelier to come again.
    """
    prompt = pages_of(c, request.prompt)
    parts = not c.config.window and not c.config.states and prompt > 0 and prompt < pages
    node, took, entered, owned = c.root, 0, request.entered, request.protected
    for again in range(2 if parts else 1):
        if again:
            clause("part-prompt", "UnifiedRadixCache.cache_finished_req", "a prompt is parted from what came after it")
            pages, owned, entered, state = prompt, prompt, prompt, 0
        last, took_state, _ = insert(c, request, pages, owned, entered, request.priority + again, state)
        if not again:
            node, took = last, took_state
            request.entered = max(entered, pages)
    return node, took


def release(c: Cache, request: Request, length: int) -> None:
    """A request ends: its own pages and states are free, those of a pass beyond `length` last."""
    clause("release", "release_kv_cache")
    whole, end = ceil(length, c.config.page), ceil(request.length, c.config.page)
    for first, last in ((request.protected, whole), (whole, end)):
        free_own(c, request, first, last)
    unlock(c, request)
    if c.config.states:
        for state in (request.own, request.kept_first, request.kept_second):
            free_state(c, state)
    request.running = 0


# ------------------------------------------------------------------ states of requests


def kept_state(start: int, end: int, branch: int, grid: int) -> int:
    """Length of the state that a pass over a prompt's tokens keeps; 0 for none.

    Args:
      start: tokens before the pass.
      end: tokens after it.
      branch: tokens up to where the tree's prefix goes on without a state to resume at; 0 for none.
      grid: tokens between states that it can keep (`mamba_checkpoint_grid`).
    """
    whole = (end - start) // grid * grid
    kept = start + whole
    if whole == 0:
        return 0
    # Of states on a coarser grid than the kernel's, SGLang asks for the one behind: one token more.
    asked = end if (end - start) // STATE_CHUNK * STATE_CHUNK == whole else kept + 1
    if start < branch and branch < asked and (branch - start) % grid == 0:
        return branch
    return kept


def lacking_states(c: Cache, request: Request, passes: int) -> int:
    """States that there must be: for a request's pass as many as it lacks; else one, for a copy."""
    clause("lacking-states", "ensure_mamba_capacity")
    if passes:
        return (request.own == 0) + (2 if c.config.tracked and request.kept_first == 0 else 0)
    if request.ran:  # what it has computed is entered
        return not c.config.tracked or request.tracked > 0
    return request.held.state > 0  # what it holds is shared with nobody: the first pass copies it


def take_states(c: Cache, request: Request, passes: int) -> None:
    """A request takes the states that it lacks for a pass, or one into which the first pass copies what it holds."""
    if request.own == 0 and (passes or request.held.state > 0):
        request.own = c.states.take()
    if passes and c.config.tracked and request.kept_first == 0:
        request.kept_first = c.states.take()
        request.kept_second = c.states.take()


def to_enter(c: Cache, request: Request, length: int, runs: int) -> tuple[int, int]:
    """The length at which a request is entered, and the state of that length; 0 where it has kept none.

    A running request gives the tree what it kept last, and takes a fresh one for it; one that ends has no use for any.
    If what it kept last is of a token beyond its end, it gives the one before that.
    """
    clause("state-to-enter", "_select_finished_checkpoint")
    state = request.own
    if not c.config.tracked:
        if runs:
            state = c.states.take()
        return length, state
    last, tracked = 1 - request.turn, request.tracked
    if not runs and tracked > length:
        last, tracked = request.turn, request.tracked_before
        if tracked > length:
            tracked = 0
    if tracked == 0:
        return 0, 0
    state = request.kept_second if last else request.kept_first
    if runs:
        fresh = c.states.take()
        if last:
            request.kept_second = fresh
        else:
            request.kept_first = fresh
    return tracked, state


def settle_state(c: Cache, request: Request, state: int, took: int, runs: int) -> None:
    """Takes from a request the state that it entered; a copy that the tree has no use for is free."""
    if runs:
        if not took:
            free_state(c, state)
    elif took:
        if request.own == state:
            request.own = 0
        if request.kept_first == state:
            request.kept_first = 0
        if request.kept_second == state:
            request.kept_second = 0
