"""Hooks around the methods of a `KVCacheManager` and of its pool, set on the objects; nothing in vLLM is edited.

A hook notes the call, its answer, and marks of the state before and after it; the observer makes operations of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hkv.dialects.vllm.attach.header import Sight, ids_of, offering, see, turn_of
from hkv.dialects.vllm.attach.observer import Observer
from hkv.dialects.vllm.attach.requests import UntellableError

Facts = tuple[Callable[..., None], tuple[Any, ...]]
"""Method of the observer that makes operations of a call, and its arguments."""

MUTATING = (
    ("coordinator", "allocate_new_computed_blocks"),
    ("coordinator", "free"),
    ("coordinator", "pop_blocks_for_free"),
    ("block_pool", "get_new_blocks"),
    ("block_pool", "cache_full_blocks"),
    ("block_pool", "cache_partial_block"),
    ("block_pool", "move_block_hashes"),
    ("block_pool", "unpin_blocks"),
    ("block_pool", "reset_prefix_cache"),
)
"""Methods that change a cache, and that nobody but the manager calls in vLLM 0.33's own scheduler.

The coordinator's others, called for each request of a step, change blocks through the pool's.
"""


ZEROING = ("take_new_block_ids", "record_blocks_for_zeroing")
"""Methods of which a log says something only where new blocks are zeroed; the first is called in every step."""


OFFLOADS = ("take_boundary_state_offloads", "finalize_partial_tail_offloads")
"""Methods of which a log says something only where there are recurrent groups; the first is called in every step."""


class Hooks:
    """Sets the hooks; calls of one hooked method by another are not noted.

    Args:
      manager: the manager.
      observer: who is told.
      sight: looks at the manager.
    """

    def __init__(self, manager: Any, observer: Observer, sight: Sight) -> None:
        self._manager, self._observer, self._sight = manager, observer, sight
        self._inside = [False]  # a list, whose item costs the hooks less than an attribute
        self._set: list[tuple[Any, str]] = []
        pool = manager.block_pool
        for name in (
            "new_step_starts",
            "get_computed_blocks",
            "cache_blocks",
            "free",
            "pop_blocks_for_free",
            "remove_skipped_blocks",
            "evict_blocks",
            "reset_prefix_cache",
            "take_events",
            "take_kv_cache_block_copies",
            *(ZEROING if manager.kv_cache_config.needs_kv_cache_zeroing else ()),
            *(OFFLOADS if offering(manager) else ()),
        ):
            self._hook(manager, name, getattr(self, f"_{name}"))
        self._put(manager, "allocate_slots", self._allocate_slots)
        self._hook(pool, "free_blocks", self._free_blocks)
        self._hook(pool, "touch", self._touch)
        self._hook(pool, "take_events", self._take_events)
        self._hook(pool, "evict_blocks", self._evict_blocks)
        for owner, name in MUTATING:
            self._hook(getattr(manager, owner), name, self._by_nobody(f"{owner}.{name}"))
        for single in offering(manager):
            for name in ("take_pending_boundary_state_offloads", "finalize_partial_tail_offload"):
                self._hook(single, name, self._by_nobody(name))

    def remove(self) -> None:
        """Takes the hooks away."""
        for owner, name in self._set:
            vars(owner).pop(name, None)
        self._set.clear()

    def _put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        method = getattr(owner, name)
        if name in vars(owner):
            raise UntellableError(f"{name} is replaced already")
        hooked = make(method)
        hooked.__wrapped__ = method
        setattr(owner, name, hooked)
        self._set.append((owner, name))

    def _hook(self, owner: Any, name: str, look: Callable[..., Callable[[Any], Facts | None] | None]) -> None:
        """Hooks a method that is called seldom.

        Args:
          owner: the object.
          name: the method.
          look: takes the call's arguments before it; returns a function that takes its answer, and returns the facts
            or None for a call that is nobody's business.
        """

        def make(method: Any) -> Any:
            inside, observer, mark = self._inside, self._observer, self._sight.mark

            def hooked(*arguments: Any, **named: Any) -> Any:
                if inside[0] or not observer.watching(name):
                    return method(*arguments, **named)
                arguments = tuple(list(each) if isinstance(each, Iterator) else each for each in arguments)
                before, after_call = mark(), look(*arguments, **named)
                inside[0] = True
                try:
                    answer = method(*arguments, **named)
                except Exception as error:
                    if after_call is not None:
                        observer.stop(f"{name} raised {type(error).__name__}: {_brief(error)}")
                    raise
                finally:
                    inside[0] = False
                facts = after_call(answer) if after_call is not None else None
                if facts is not None:
                    observer.note((name, before, mark(), *facts))
                    observer.begun = True
                return answer

            return hooked

        self._put(owner, name, make)

    def _allocate_slots(self, method: Any) -> Any:
        """The hook of the one method that is called for each running request of a step.

        It takes what it needs by itself, into one tuple: a call of a function, and each further
        object that the garbage collector has to visit, cost as much as all the rest.
        """
        inside, observer, note = self._inside, self._observer, self._observer.note
        pool, queue = self._manager.block_pool, self._manager.block_pool.free_block_queue
        whole_mark = self._sight.mark if self._sight.whole else None

        def allocate_slots(
            request: Any,
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
        ) -> Any:
            if inside[0] or not (observer.begun or observer.watching("allocate_slots")):
                return method(
                    request,
                    num_new_tokens,
                    num_new_computed_tokens,
                    new_computed_blocks,
                    num_lookahead_tokens,
                    num_external_computed_tokens,
                    delay_cache_blocks,
                    num_encoder_tokens,
                    full_sequence_must_fit,
                    reserved_blocks,
                    has_scheduled_reqs,
                    skip_zeroing_group_ids,
                )
            before = whole_mark and whole_mark()
            free, cached = queue.num_free_blocks, len(pool.cached_block_hash_to_block._cache)
            computed, length, count = (
                request.num_computed_tokens,
                len(request._all_token_ids),
                len(request.block_hashes),
            )
            turn = (turn_of(request), request.block_hashes.copy()) if request.resumable else None
            in_flight, boundary, status = (
                request.num_in_flight_tokens,
                request.shared_prefix_boundary,
                request.status,
            )
            adopted = None if new_computed_blocks is None else ids_of(new_computed_blocks.blocks)
            inside[0] = True
            try:
                # Argument by argument, as Python calls a Python function without a frame of C between them.
                answer = method(
                    request,
                    num_new_tokens,
                    num_new_computed_tokens,
                    new_computed_blocks,
                    num_lookahead_tokens,
                    num_external_computed_tokens,
                    delay_cache_blocks,
                    num_encoder_tokens,
                    full_sequence_must_fit,
                    reserved_blocks,
                    has_scheduled_reqs,
                    skip_zeroing_group_ids,
                )
            except Exception as error:
                # Without anything to allocate, it raises before it changes anything.
                if num_new_tokens or num_new_computed_tokens or num_external_computed_tokens:
                    observer.stop(f"allocate_slots raised {type(error).__name__}: {_brief(error)}")
                raise
            finally:
                inside[0] = False
            note(
                (
                    "allocate_slots",
                    before,
                    whole_mark and whole_mark(),
                    free,
                    cached,
                    queue.num_free_blocks,
                    len(pool.cached_block_hash_to_block._cache),
                    request,
                    computed,
                    length,
                    count,
                    turn,
                    in_flight,
                    boundary,
                    status,
                    num_new_tokens,
                    num_new_computed_tokens,
                    new_computed_blocks,
                    num_lookahead_tokens,
                    num_external_computed_tokens,
                    delay_cache_blocks,
                    num_encoder_tokens,
                    full_sequence_must_fit,
                    reserved_blocks,
                    has_scheduled_reqs,
                    skip_zeroing_group_ids,
                    adopted,
                    answer,
                )
            )
            observer.begun = True
            return answer

        return allocate_slots

    # The manager's methods.

    def _new_step_starts(self) -> Any:
        return lambda _: (self._observer.new_step, (self._observer.state_of_step(),))

    def _get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        if not self._manager.prefix_cache_lookup_enabled(request):
            return None
        mode = getattr(request, "kv_cache_report_mode", "") if self._manager.enable_kv_cache_events else ""
        seen = see(request)
        return lambda answer: (self._observer.looked_up, (seen, mode, max_cache_hit_length, answer))

    def _cache_blocks(self, request: Any, num_computed_tokens: int) -> Any:
        seen = see(request)
        return lambda _: (self._observer.cached, (seen, num_computed_tokens))

    def _free(self, request: Any) -> Any:
        return lambda _: self._freed(request, False)

    def _pop_blocks_for_free(self, request: Any) -> Any:
        return lambda _: self._freed(request, True)

    def _freed(self, request: Any, popped: bool) -> Facts:
        return self._observer.freed, (request.request_id, request.is_finished(), popped)

    def _remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> Any:
        return lambda _: (self._observer.retired, (request_id, processed_computed_tokens))

    def _evict_blocks(self, block_ids: set[int]) -> Any:
        ids = sorted(block_ids)
        return lambda _: (self._observer.evicted, (ids,))

    def _reset_prefix_cache(self) -> Any:
        return lambda done: (self._observer.reset, (done,))

    def _take_events(self) -> Any:
        if not self._manager.block_pool.enable_kv_cache_events:
            return None
        return lambda events: (self._observer.drained, (events,))

    def _take_kv_cache_block_copies(self) -> Any:
        def look(answer: Any) -> Facts:
            self._observer.step_ends()
            return self._observer.copied, (answer[0],)

        return look

    def _take_new_block_ids(self) -> Any:
        return lambda ids: (self._observer.zeroed, (ids,))

    def _record_blocks_for_zeroing(self, request_id: str, start_token: int) -> Any:
        return lambda _: (self._observer.unwritten, (request_id, start_token))

    def _take_boundary_state_offloads(self) -> Any:
        return lambda offers: (self._observer.offered, ({id: list(each) for id, each in offers.items()},))

    def _finalize_partial_tail_offloads(self, request: Any) -> Any:
        seen, in_flight = see(request), request.num_in_flight_tokens
        return lambda tails: (self._observer.finalized, (seen, in_flight, list(tails)))

    # The pool's, called by others than the manager.

    def _free_blocks(self, ordered_blocks: Sequence[Any]) -> Any:
        blocks = list(ordered_blocks)
        return lambda _: (self._observer.released, (blocks,))

    def _touch(self, blocks: Sequence[Any]) -> Any:
        blocks = list(blocks)
        return lambda _: (self._observer.held, (blocks,))

    def _by_nobody(self, name: str) -> Any:
        def look(*_: Any, **__: Any) -> None:
            self._observer.stop(f"{name} was called, not by the manager")

        return look


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
