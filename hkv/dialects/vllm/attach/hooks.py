"""Hooks around the methods of a `KVCacheManager` and of its pool, set on the objects; nothing in vLLM is edited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hkv.dialects.vllm.attach.requests import UntellableError

if TYPE_CHECKING:
    from hkv.dialects.vllm.attach.observer import Observer

Body = Callable[..., Any]

MUTATING = (
    ("coordinator", "allocate_new_computed_blocks"),
    ("coordinator", "allocate_new_blocks"),
    ("coordinator", "cache_blocks"),
    ("coordinator", "free"),
    ("coordinator", "pop_blocks_for_free"),
    ("coordinator", "remove_skipped_blocks"),
    ("block_pool", "get_new_blocks"),
    ("block_pool", "cache_full_blocks"),
    ("block_pool", "cache_partial_block"),
    ("block_pool", "move_block_hashes"),
    ("block_pool", "unpin_blocks"),
    ("block_pool", "evict_blocks"),
    ("block_pool", "reset_prefix_cache"),
)
"""Methods that change a cache, and that nobody but the manager calls in vLLM 0.33's own scheduler."""


class Hooks:
    """Sets the hooks; calls of one hooked method by another are not told.

    Args:
      manager: the manager.
      observer: who is told.
    """

    def __init__(self, manager: Any, observer: Observer) -> None:
        self._observer = observer
        self._depth = 0
        self._set: list[tuple[Any, str]] = []
        pool = manager.block_pool
        for name in (
            "new_step_starts",
            "get_computed_blocks",
            "allocate_slots",
            "cache_blocks",
            "free",
            "pop_blocks_for_free",
            "remove_skipped_blocks",
            "evict_blocks",
            "reset_prefix_cache",
            "take_events",
            "take_kv_cache_block_copies",
        ):
            self._hook(manager, name, getattr(self, f"_{name}"))
        self._hook(pool, "free_blocks", self._free_blocks)
        self._hook(pool, "touch", self._touch)
        self._hook(pool, "take_events", self._take_events)
        for owner, name in MUTATING:
            self._hook(getattr(manager, owner), name, self._told_by_nobody(f"{owner}.{name}"))

    def remove(self) -> None:
        """Takes the hooks away."""
        for owner, name in self._set:
            vars(owner).pop(name, None)
        self._set.clear()

    def _hook(self, owner: Any, name: str, body: Body) -> None:
        """Puts a function of the same signature in a method's place on one object."""
        method = getattr(owner, name)
        if name in vars(owner):
            raise UntellableError(f"{name} is replaced already")

        def hooked(*arguments: Any, **named: Any) -> Any:
            if self._depth:
                return method(*arguments, **named)
            observer = self._observer
            observer.look_for_changes(name)
            if observer.ended:
                return method(*arguments, **named)
            self._depth += 1
            try:
                return body(method, *arguments, **named)
            except UntellableError as reason:
                raise AssertionError(f"{name}: {reason}") from reason
            finally:
                self._depth -= 1
                observer.settle()

        hooked.__wrapped__ = method  # type: ignore[attr-defined]
        setattr(owner, name, hooked)
        self._set.append((owner, name))

    def _called(self, name: str, method: Body, *arguments: Any, **named: Any) -> Any:
        """Calls the method; an error ends the log, unless it comes before anything has changed."""
        try:
            return method(*arguments, **named)
        except Exception as error:
            self._observer.end(f"{name} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            raise

    def _tell(self, name: str, telling: Callable[[], Any]) -> Any:
        """Result of `telling`; None, and the log ends, where it cannot tell."""
        if self._observer.ended:
            return None
        try:
            return telling()
        except UntellableError as reason:
            self._observer.end(f"{name}: {reason}")
            return None

    # The manager's methods.

    def _new_step_starts(self, method: Body) -> None:
        method()
        self._observer.new_step()

    def _get_computed_blocks(self, method: Body, request: Any, max_cache_hit_length: int | None = None) -> Any:
        name = self._tell("get_computed_blocks", lambda: self._observer.looks_up(request))
        answer = self._called("get_computed_blocks", method, request, max_cache_hit_length)
        if name:
            self._tell("get_computed_blocks", lambda: self._observer.looked_up(name, max_cache_hit_length, answer))
        return answer

    def _allocate_slots(self, method: Body, request: Any, num_new_tokens: int, *rest: Any, **named: Any) -> Any:
        observer = self._observer
        given = _Given(num_new_tokens, *rest, **named)
        try:
            tracked, found = observer.allocates(request, given.num_encoder_tokens)
        except UntellableError as reason:
            observer.end(f"allocate_slots: {reason}")
            return method(request, num_new_tokens, *rest, **named)
        if not (num_new_tokens or given.num_new_computed_tokens or given.num_external_computed_tokens):
            return method(request, num_new_tokens, *rest, **named)  # it raises before it does anything
        answer = self._called("allocate_slots", method, request, num_new_tokens, *rest, **named)
        try:
            observer.allocated(tracked, found, given, answer)
        except UntellableError as reason:
            observer.end(f"allocate_slots: {reason}")
        return answer

    def _cache_blocks(self, method: Body, request: Any, num_computed_tokens: int) -> None:
        tracked = self._tell("cache_blocks", lambda: self._observer.up_to_date(request))
        self._called("cache_blocks", method, request, num_computed_tokens)
        if tracked is not None:
            self._tell("cache_blocks", lambda: self._observer.cached(tracked, num_computed_tokens))

    def _free(self, method: Body, request: Any) -> None:
        self._called("free", method, request)
        self._tell("free", lambda: self._observer.freed(request, popped=False))

    def _pop_blocks_for_free(self, method: Body, request: Any) -> Any:
        answer = self._called("pop_blocks_for_free", method, request)
        self._tell("pop_blocks_for_free", lambda: self._observer.freed(request, popped=True))
        return answer

    def _remove_skipped_blocks(
        self, method: Body, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        self._called("remove_skipped_blocks", method, request_id, processed_computed_tokens, num_prompt_tokens)
        self._observer.retired(request_id, processed_computed_tokens)

    def _evict_blocks(self, method: Body, block_ids: set[int]) -> None:
        self._called("evict_blocks", method, block_ids)
        self._observer.evicted(block_ids)

    def _reset_prefix_cache(self, method: Body) -> bool:
        done = self._called("reset_prefix_cache", method)
        self._observer.reset(done)
        return done

    def _take_events(self, method: Body) -> Any:
        events = self._called("take_events", method)
        self._observer.drained(events)
        return events

    def _take_kv_cache_block_copies(self, method: Body) -> Any:
        copies, retained = self._called("take_kv_cache_block_copies", method)
        self._observer.copied(copies)
        return copies, retained

    # The pool's, called by others than the manager.

    def _free_blocks(self, method: Body, ordered_blocks: Any) -> None:
        blocks = list(ordered_blocks)
        self._called("free_blocks", method, blocks)
        self._observer.released(blocks)

    def _touch(self, method: Body, blocks: Sequence[Any]) -> None:
        self._called("touch", method, blocks)
        self._observer.held(blocks)

    def _told_by_nobody(self, name: str) -> Body:
        def body(method: Body, *arguments: Any, **named: Any) -> Any:
            self._observer.end(f"{name} was called, not by the manager")
            return method(*arguments, **named)

        return body


class _Given:
    """Arguments of `allocate_slots` beside the request, with vLLM 0.33's defaults."""

    __slots__ = (
        "delay_cache_blocks",
        "full_sequence_must_fit",
        "has_scheduled_reqs",
        "new_computed_blocks",
        "num_encoder_tokens",
        "num_external_computed_tokens",
        "num_lookahead_tokens",
        "num_new_computed_tokens",
        "num_new_tokens",
        "reserved_blocks",
    )

    def __init__(
        self,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> None:
        del skip_zeroing_group_ids
        self.num_new_tokens = num_new_tokens
        self.num_new_computed_tokens = num_new_computed_tokens
        self.new_computed_blocks = new_computed_blocks
        self.num_lookahead_tokens = num_lookahead_tokens
        self.num_external_computed_tokens = num_external_computed_tokens
        self.delay_cache_blocks = delay_cache_blocks
        self.num_encoder_tokens = num_encoder_tokens
        self.full_sequence_must_fit = full_sequence_must_fit
        self.reserved_blocks = reserved_blocks
        self.has_scheduled_reqs = has_scheduled_reqs
