"""Facts of a live `KVCacheManager` and its requests at one moment, taken before they change.

The observed thread takes these and nothing more; `observer.py` makes operations of them, later and elsewhere. Each is
taken with few bytecodes: a running request is looked at in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.log.structs import CacheState

Mark: TypeAlias = tuple[Any, ...]
"""Values that change whenever a manager's blocks do, for the first of `MARKS`; they stay alike between two calls."""

MARKS = (
    "free blocks",
    "cached keys",
    "events",
    "first free block",
    "last free block",
    "retention_interval",
    "watermark_blocks",
    "max_model_len",
    "references",
    "rows",
    "keys",
    "queue",
)
"""Names of the values of a mark."""


Seen: TypeAlias = tuple[Any, int, int, int, list[int], list[bytes]]
"""A request at one moment: vLLM's object; `num_computed_tokens`; numbers of its tokens and of its block hashes; the
lists of both, which only grow but for those of streaming sessions, of which these are copies (`Turn`)."""


class Turn(list[int]):
    """Tokens of a streaming session, whose prompt and multimodal items grow, too.

    Attributes:
      prompt: tokens of its prompt.
      items: number of its multimodal items.
    """

    prompt: int
    items: int


def turn_of(request: Any) -> Turn:
    """A copy of a streaming session's tokens as they are now."""
    turn = Turn(request._all_token_ids)
    turn.prompt, turn.items = request.num_prompt_tokens, len(request.mm_features)
    return turn


def see(request: Any) -> Seen:
    """The request as it is now."""
    tokens, hashes = request._all_token_ids, request.block_hashes
    if request.resumable:
        tokens, hashes = turn_of(request), hashes.copy()
    return request, request.num_computed_tokens, len(tokens), len(hashes), tokens, hashes


class Sight:
    """Looks at one manager.

    Args:
      manager: vLLM's `KVCacheManager`.
      whole: whether marks hold the whole state.

    Attributes:
      whole: as given.
      mark: takes a mark.
    """

    def __init__(self, manager: Any, whole: bool) -> None:
        self._manager, self._pool = manager, manager.block_pool
        self.whole = whole
        self.mark = self._marker(whole)

    def _marker(self, whole: bool) -> Callable[[], Mark]:
        manager, coordinator, pool = self._manager, self._manager.coordinator, self._pool
        queue = pool.free_block_queue
        head, tail = queue.fake_free_list_head, queue.fake_free_list_tail

        def mark() -> Mark:
            return (
                queue.num_free_blocks,
                len(pool.cached_block_hash_to_block._cache),  # a reset makes another map
                len(pool.kv_event_queue),
                head.next_free_block,
                tail.prev_free_block,
                coordinator.retention_interval,
                manager.watermark_blocks,
                manager.max_model_len,
            )

        def mark_of_all() -> Mark:
            state = self.state()
            return (*mark(), state.refs, state.rows, state.cached, state.free)

        return mark_of_all if whole else mark

    def state(self) -> CacheState:
        """The whole state; rows stand under vLLM's own ids."""
        blocks = [block for block in self._pool.blocks if not block.is_null]
        groups = self._manager.coordinator.single_type_managers
        ids = dict.fromkeys(id for group in groups for id in group.req_to_blocks)
        rows = {id: ids_of(self._manager.coordinator.get_blocks(id)) for id in ids}
        return CacheState(
            free=[block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()],
            refs={str(block.block_id): block.ref_cnt for block in blocks if block.ref_cnt},
            rows={id: row for id, row in rows.items() if any(row)},
            cached={str(b.block_id): vllm_objects.cached_entry(b) for b in blocks if b.block_hash is not None},
        )


def ids_of(groups: Iterable[Iterable[Any]]) -> list[list[int]]:
    """Block ids per group."""
    return [[block.block_id for block in group] for group in groups]
