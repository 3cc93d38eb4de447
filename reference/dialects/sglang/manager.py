"""Requests under SGLang's rules: what they take from the tree, what is theirs alone, and when it becomes the tree's.

A request has a row of full slots, one a token. The first `protected` of them are the tree's, which the request holds
by a lock; the others are its own. After each chunk of its prompt, and at its end, it enters what it has computed, and
the tree's slots take the place of its own. So a prompt is shared as soon as its first chunk is computed.

After SGLang 0.5.23, `unified_radix_cache.py` (`checkpoint_into_tree`), `common.py` and `allocation.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hkv.dialects.sglang.config import FULL, MAMBA, SGLangConfig
from hkv.errors import OperationError
from reference.dialects.sglang.eviction import evict, evict_for
from reference.dialects.sglang.key import Key, Namespace
from reference.dialects.sglang.locks import Locks, Receipt
from reference.dialects.sglang.pool import Pools
from reference.dialects.sglang.tree import PrefixMatch, RadixTree


@dataclasses.dataclass
class SGLangRequest:
    """A request.

    Attributes:
      tokens: prompt and output.
      prompt: tokens of the prompt.
      namespace: of its keys.
      priority: a larger one keeps its nodes longer, under the policy of that name.
      row: the full slot of each token that has one.
      lock: on the prefix that the tree has.
      protected: so many slots of the row are the tree's.
      counted: so many tokens it has entered.
      evicted: of so many, those the tree owns apart, the window's slots have been freed.
      ran: whether it has computed a token since it came.
      own: its own state, which each forward pass goes on from; None before the first.
      tracking: two states in turn that keep what it was at lengths it has passed; none unless that is asked for.
      next: which of the two is written next; the other one was written last.
      tracked: length of the last of them; None where none was kept since it was entered.
      tracked_before: length of the other one, if it is of a token that was decoded since then, too.
      branch: length at which its first insert ends, so that the prefix it shares there gets a window; None for none.
    """

    tokens: list[int]
    prompt: int
    namespace: Namespace
    priority: int
    row: list[int]
    lock: Receipt
    protected: int
    counted: int = 0
    evicted: int = 0
    ran: bool = False
    own: int | None = None
    tracking: list[int] = dataclasses.field(default_factory=list[int])
    next: int = 0
    tracked: int | None = None
    tracked_before: int | None = None
    branch: int | None = None


class SGLangManager:
    """SGLang's cache under the requests of a scheduler.

    Attributes:
      config: the cache's configuration.
      pools: its slots.
      tree: what is cached.
      requests: those that run, by name.
    """

    def __init__(self, config: SGLangConfig) -> None:
        self.config = config
        self.pools = Pools(config)
        self.tree = RadixTree(config, self.pools)
        self.locks = Locks(config.window)
        self.requests: dict[str, SGLangRequest] = {}

    def match(self, tokens: Sequence[int], namespace: Namespace = (None, None)) -> PrefixMatch:
        """The longest cached prefix of some tokens; that it was asked for counts as a use."""
        return self.tree.match(Key.of(tokens, namespace, eagle=self.config.bigrams))

    def admit(
        self, id: str, tokens: Sequence[int], namespace: Namespace = (None, None), priority: int = 0
    ) -> PrefixMatch:
        """A request comes, and holds the longest prefix of its tokens but the last, which is computed in any case."""
        if id in self.requests:
            raise OperationError("id", id, "a name that no running request has")
        if not tokens:
            raise OperationError("tokens", list(tokens), "at least 1 token")
        match = self.match(tokens[:-1], namespace)
        row, lock = match.node.slots(), self.locks.lock(match.node)
        request = SGLangRequest(list(tokens), len(tokens), namespace, priority, row, lock, match.length)
        if match.node.state is not None:  # it is shared with nobody: the first pass copies it
            try:
                request.own = self._state()
            except OperationError:
                self.locks.unlock(lock)
                raise
        # Beside states a window has no say in where an insert ends: a state stands for its length alone.
        request.branch = None if self.config.window is None or self.config.states is not None else match.branch
        self.requests[id] = request
        return match

    def extend(self, id: str, length: int, track: int = 0) -> list[int] | None:
        """Slots for a request's tokens up to a length: those that are new, or None if there is no room.

        Args:
          id: the request.
          length: tokens of it that shall have slots.
          track: length at which the pass keeps a state; 0 for none.
        """
        request = self._request(id)
        start, size = len(request.row), self.config.page_size
        if not start < length <= len(request.tokens):
            raise OperationError("length", length, f"from {start + 1} to {len(request.tokens)} tokens")
        if track and not start < track <= length:
            raise OperationError("track", track, f"0, or from {start + 1} to {length} tokens")
        self._hold_states(request)
        # With pages the engine asks for one more than could be needed.
        evict_for(self.tree, length - start + (size if size > 1 else 0))
        slots = self.pools.extend(start, length, request.row[-1] if request.row else -1)
        request.row += slots or []
        request.ran |= slots is not None
        if slots is not None and track:
            self._track(request, track)
            request.tracked_before = None
        return slots

    def decode(self, id: str, token: int, *, track: bool = False) -> int | None:
        """The slot of one more token; None if there is no room, and the token does not come. `track`: keep the state
        after it."""
        request = self._request(id)
        if len(request.row) != len(request.tokens):
            raise OperationError("id", id, "a request whose tokens all have slots")
        evict_for(self.tree, self.config.page_size)
        slot = self.pools.decode(len(request.row), request.row[-1])
        if slot is not None:
            request.tokens.append(token)
            request.row.append(slot)
            if track:
                self._track(request, len(request.row))
        return slot

    def slide(self, id: str, every: int = 1) -> None:
        """Frees the window's slots that a decoding request reads no more, once they are so many or more
        (`evict_sliding_windows`)."""
        request = self._request(id)
        self._slide(request, len(request.row), every)

    def checkpoint(self, id: str) -> None:
        """Enters what a running request has computed (`checkpoint_kv_cache`)."""
        self._enter(id, finished=False)

    def release_window(self, id: str) -> None:
        """Gives back the lock on the window's part of a request's prefix, which it has decoded past."""
        lock = self._request(id).lock
        if lock.mark is not None:
            self.locks.release_window(lock)

    def finish(self, id: str, length: int = 0) -> None:
        """A request ends, and what it has computed is entered.

        Args:
          id: the request.
          length: tokens of it that count, where a pass ran beyond the one that ends it; 0 for all.
        """
        request = self._request(id)
        # What the tree has of it ends with a unit, which under EAGLE takes one token more: SGLang fails an assertion.
        least = request.protected + self.config.bigrams
        if length and not least <= length <= len(request.row):
            raise OperationError("length", length, f"from {least} to {len(request.row)} tokens")
        self._enter(id, finished=True, length=length)
        self._release(id, length)

    def abort(self, id: str) -> None:
        """A request ends, and nothing is entered; so does one that is retracted to come again."""
        self._release(id)

    def evict(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """Frees so many tokens of each component; how many it freed."""
        return evict(self.tree, wanted)

    def room(self, tokens: int) -> tuple[dict[str, int], dict[str, int]]:
        """Evicts until so many tokens are free in each pool; tokens that are free, and that nobody holds, of states
        as well (`evict_from_tree_cache`)."""
        evict_for(self.tree, tokens)
        return self.pools.available, {name: idle for name, (idle, _) in self.tree.ledgers().items()}

    def _enter(self, id: str, *, finished: bool, length: int = 0) -> None:
        """Enters a request's tokens, takes the tree's slots for its own, and holds what it ends on."""
        request = self._request(id)
        eagle, branch = self.config.bigrams, request.branch
        length = length or len(request.row)
        if not request.ran:
            raise OperationError("id", id, "a request that has computed a token since it came")
        # The prefix that a window kept this request from using ends here, so that the next one can use it.
        branching = branch is not None and branch > request.protected and branch + eagle <= length
        if branching:
            assert branch is not None
            length = branch + eagle
        state = None
        if self.config.states is not None:
            length, state = self._to_enter(request, length, finished=finished)
        key = Key.of(request.tokens[:length], request.namespace, eagle=eagle)
        if not finished:
            self._slide(request, len(key) - 1)
        if not length:
            request.tracked = request.tracked_before = None
            return
        slots = {"owned": request.protected, "evicted": request.evicted, "counted": request.counted}
        entered = self.tree.insert(key, request.row, priority=request.priority, state=state, **slots)
        if state is not None and not entered.took_state and not finished:
            self._give_back_states([state])
        if finished and entered.took_state:
            self._forget_state(request, state)
        request.tracked = request.tracked_before = None
        key = key.whole_pages(self.config.page_size)
        request.counted = max(request.counted, len(key))
        if self.config.components == (FULL,):
            self._part_prompt(request, key)
        request.row[request.protected : len(key)] = entered.node.slots()[request.protected :]
        self.locks.unlock(request.lock)
        request.lock = self.locks.lock(entered.node)
        request.protected = len(key)
        if branching:
            request.branch = None
            if not finished:
                self._slide(request, len(request.row) - eagle - 1)

    def _part_prompt(self, request: SGLangRequest, key: Key) -> None:
        """Parts a prompt from what was generated after it, and keeps it longer: it is likelier to come again."""
        prompt = Key.of(request.tokens[: request.prompt], request.namespace, eagle=self.config.bigrams)
        prompt = prompt.whole_pages(self.config.page_size)
        if 0 < len(prompt) < len(key):
            slots = {"owned": len(prompt), "counted": len(prompt)}
            self.tree.insert(prompt, request.row, priority=request.priority + 1, **slots)

    def _slide(self, request: SGLangRequest, length: int, every: int = 1) -> None:
        """Frees window slots of a request's own that a query at `length` does not read, but for whole pages' sake."""
        if self.config.window is None or length - self.config.window < request.evicted + every:
            return
        size = self.config.page_size
        start = max(request.evicted, request.protected)
        kept = -(-max(self.config.window, size) // size) * size
        floor = length - kept
        if request.tracked is not None:  # the next match ends at the state that was kept, and reads a window there
            floor = min(floor, request.tracked - self.config.window)
        end = max(start, floor) // size * size
        request.evicted = start
        if end > start:
            self.pools.give_back_window(request.row[start:end])
            request.evicted = end

    def _release(self, id: str, length: int = 0) -> None:
        request, size = self._request(id), self.config.page_size
        length = length or len(request.row)
        self._give_back(request, request.protected, length)
        self.locks.unlock(request.lock)
        self._give_back(request, -(-length // size) * size, len(request.row))
        self._give_back_states([state for state in (request.own, *request.tracking) if state is not None])
        del self.requests[id]

    def _give_back(self, request: SGLangRequest, start: int, end: int) -> None:
        """Frees a request's own slots of some positions, of those whose window's are gone the full ones."""
        if start < end:
            live = min(max(start, request.evicted), end)
            self.pools.full.give_back(request.row[start:live])
            self.pools.give_back(request.row[live:end])

    def _hold_states(self, request: SGLangRequest) -> None:
        """States for a request's first pass, as many as it lacks (`ensure_mamba_capacity`)."""
        if self.config.states is None:
            return
        pair = 2 if self.config.tracked and not request.tracking else 0
        lacking = pair + (request.own is None)
        evict_for(self.tree, states=lacking)
        if self.pools.available[MAMBA] < lacking:
            raise OperationError("states", self.config.states, f"{lacking} states that no request holds")
        if request.own is None:
            request.own = self._state()
        for _ in range(pair):
            request.tracking.append(self._state())

    def _state(self) -> int:
        """A free state; if none is free, the least recently used one of the tree is evicted."""
        assert self.pools.states is not None
        if not self.pools.states.free:
            evict_for(self.tree, states=1)
        taken = self.pools.states.extend(0, 1, -1)
        if taken is None:
            raise OperationError("states", self.config.states, "a state that no request holds")
        return taken[0]

    def _give_back_states(self, states: list[int]) -> None:
        if self.pools.states is not None:
            self.pools.states.give_back(states)

    def _track(self, request: SGLangRequest, length: int) -> None:
        """A pass keeps a state of a length, in the one of the two that was not written last."""
        request.tracked_before, request.tracked, request.next = request.tracked, length, 1 - request.next

    def _to_enter(self, request: SGLangRequest, length: int, *, finished: bool) -> tuple[int, int | None]:
        """The length at which a request is entered, and the state of that length; 0 where it has kept none.

        A running request gives the tree what it kept last, and takes a fresh one for it; one that ends has no use for
        any. If what it kept last is of a token beyond its end, it gives the one before that
        (`_select_finished_checkpoint`).
        """
        if not self.config.tracked:
            return length, request.own if finished else self._state()
        if request.tracked is None:
            return 0, None
        last, tracked = 1 - request.next, request.tracked
        if finished and tracked > length:
            last, tracked = request.next, request.tracked_before
            if tracked is None or tracked > length:
                return 0, None
        kept = request.tracking[last]
        if not finished:
            request.tracking[last] = self._state()
        return tracked, kept

    def _forget_state(self, request: SGLangRequest, state: int | None) -> None:
        """The tree has a state of a request that ends."""
        request.tracking = [each for each in request.tracking if each != state]
        request.own = None if request.own == state else request.own

    def _request(self, id: str) -> SGLangRequest:
        try:
            return self.requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that runs") from None
