"""Hooks around the methods of a `KVCacheManager` and of its pool, set on the objects; nothing in vLLM is edited.

A hook notes the call, its answer, and marks of the state before and after it; the observer makes operations of that.
"""

# pyright: reportPossiblyUnboundVariable=false
# (what is noted of a call is looked at only where it is noted)

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from hkv.dialects.vllm.attach.header import offering, see, turn_of
from hkv.dialects.vllm.attach.observer import Observer
from hkv.dialects.vllm.attach.requests import UntellableError
from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.log.structs import ConnectorHit

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


class Hooks:
    """Sets the hooks; calls of one hooked method by another are not noted."""

    def __init__(self, manager: Any, observer: Observer) -> None:
        self._manager, self._observer = manager, observer
        self._inside = [False]  # a list, whose item costs the hooks less than an attribute
        self._set: list[tuple[Any, str]] = []
        pool = manager.block_pool
        looks = {
            "new_step_starts": self._new_step_starts,
            "get_computed_blocks": self._get_computed_blocks,
            "cache_blocks": _as_called(observer.cached),
            "free": self._freed(popped=False),
            "pop_blocks_for_free": self._freed(popped=True),
            "remove_skipped_blocks": _as_called(observer.retired),
            "evict_blocks": _as_called(observer.evicted),
            "reset_prefix_cache": _as_called(observer.reset),
            "take_events": self._take_events,
            "take_kv_cache_block_copies": self._take_kv_cache_block_copies,
        }
        if hasattr(manager, "get_computed_blocks_for_connector"):  # not before 0.33
            looks["get_computed_blocks_for_connector"] = self._get_computed_blocks_for_connector
            looks["truncate_computed_blocks"] = self._truncate_computed_blocks
        # Said only where new blocks are zeroed, or where there are recurrent groups; some are called in every step.
        if manager.kv_cache_config.needs_kv_cache_zeroing:
            looks["take_new_block_ids"] = _as_called(observer.zeroed)
            looks["record_blocks_for_zeroing"] = _as_called(observer.unwritten)
        if offering(manager):
            looks["take_boundary_state_offloads"] = _as_called(observer.offered)
            looks["finalize_partial_tail_offloads"] = self._finalize_partial_tail_offloads
        for name, look in looks.items():
            self._hook(manager, name, look)
        self._put(manager, "allocate_slots", self._allocate_slots)
        self._hook(pool, "free_blocks", _as_called(observer.released))
        self._hook(pool, "touch", _as_called(observer.held))
        self._hook(pool, "take_events", self._take_events)
        self._hook(pool, "evict_blocks", looks["evict_blocks"])
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

        `look` takes the call's arguments before it; it returns a function that takes its answer, and returns the facts,
        or None for a call that is nobody's business.
        """

        def make(method: Any) -> Any:
            inside, observer, mark = self._inside, self._observer, self._observer.mark

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
        whole_mark = observer.mark if observer.whole else None

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
            nested = inside[0]
            noted = not nested and (observer.begun or observer.watching("allocate_slots"))
            if noted:
                before = whole_mark and whole_mark()
                free, cached = queue.num_free_blocks, len(pool.cached_block_hash_to_block._cache)
                computed, length = request.num_computed_tokens, len(request._all_token_ids)
                count, status = len(request.block_hashes), request.status
                turn = (turn_of(request), request.block_hashes.copy()) if request.resumable else None
                in_flight, boundary = request.num_in_flight_tokens, request.shared_prefix_boundary
                adopted = None if new_computed_blocks is None else vllm_objects.ids(new_computed_blocks.blocks)
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
                if noted and (num_new_tokens or num_new_computed_tokens or num_external_computed_tokens):
                    observer.stop(f"allocate_slots raised {type(error).__name__}: {_brief(error)}")
                raise
            finally:
                inside[0] = nested
            if not noted:
                return answer
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

    def _get_computed_blocks_for_connector(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        if not self._manager.prefix_cache_lookup_enabled(request):
            return None
        seen, each = see(request), getattr(self._manager.coordinator, "find_longest_cache_hit_per_group", None)
        most = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        groups = self._manager.num_kv_cache_groups

        def look(answer: Any) -> Facts:
            blocks, hit, boundary, diverged = answer
            hits = [hit] * groups if each is None else list(each(request.block_hashes, most)[1])
            found = ConnectorHit(hit, vllm_objects.ids(blocks.blocks), boundary, diverged, hits)
            return self._observer.connector_looked_up, (seen, max_cache_hit_length, found)

        return look

    def _truncate_computed_blocks(self, blocks: Any, num_computed_tokens: int) -> Any:
        rows, tell = vllm_objects.ids(blocks.blocks), self._observer.truncated
        return lambda left: (tell, (rows, num_computed_tokens, vllm_objects.ids(left.blocks)))

    def _freed(self, popped: bool) -> Any:
        tell = self._observer.freed
        return lambda request: lambda _: (tell, (request.request_id, request.is_finished(), popped))

    def _take_events(self) -> Any:
        if not self._manager.block_pool.enable_kv_cache_events:
            return None
        return lambda events: (self._observer.drained, (list(events),))  # the scheduler adds a connector's to them

    def _take_kv_cache_block_copies(self) -> Any:
        def look(answer: Any) -> Facts:
            self._observer.step_ends()
            return self._observer.copied, (answer[0],)

        return look

    def _finalize_partial_tail_offloads(self, request: Any) -> Any:
        seen, in_flight = see(request), request.num_in_flight_tokens
        return lambda tails: (self._observer.finalized, (seen, in_flight, list(tails)))

    def _by_nobody(self, name: str) -> Any:
        def look(*_: Any, **__: Any) -> None:
            self._observer.stop(f"{name} was called, not by the manager")

        return look


def _as_called(tell: Callable[..., None]) -> Callable[..., Any]:
    """Facts of a call that is recorded by its answer and its arguments, those as they were before it."""

    def look(*arguments: Any, **named: Any) -> Any:
        kept, named = [_kept(value) for value in arguments], {name: _kept(value) for name, value in named.items()}
        return lambda answer: (functools.partial(tell, _kept(answer), *kept, **named), ())

    return look


def _kept(value: Any) -> Any:
    """An argument or an answer as it is now."""
    if isinstance(value, dict):
        return {name: list(each) for name, each in value.items()}
    if isinstance(value, list | set | tuple):
        return list(value)
    return see(value) if hasattr(value, "_all_token_ids") else value


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
