"""The header that describes a live `KVCacheManager`, read from its objects."""

from __future__ import annotations

import bisect
import collections
import operator
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import NAME
from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.engines.vllm_objects import KINDS_BY_CLASS, REPLAYED
from hkv.dialects.vllm.log.structs import CacheState, Header
from hkv.dialects.vllm.traffic.headers import MANAGER_BUGS
from hkv.errors import UnsupportedConfigError
from hkv.spec import KINDS, log_variants

FEATURE = "attached"
"""The `feature` of logs of live caches."""


def header_from(manager: Any, max_in_flight_tokens: int | None = None) -> Header:
    """Header of version 4 for a manager; its chain hash, which the manager does not know, is the default.

    Prefill context parallelism (`pcp_world_size`) is not said: no block id depends on it, only what vLLM asserts.

    `max_in_flight_tokens` are those it was made with, which it does not keep; None: derived from what it made of it.

    Raises:
      UnsupportedConfigError: the log has no words for it.
    """
    coordinator, pool = manager.coordinator, manager.block_pool
    groups = [
        _entry(index, group, single)
        for index, (group, single) in enumerate(
            zip(manager.kv_cache_config.kv_cache_groups, coordinator.single_type_managers, strict=True)
        )
    ]
    _check_alike(manager, groups)
    ranks = max([single.dcp_world_size for single in coordinator.single_type_managers], default=1)
    if max_in_flight_tokens is None:
        max_in_flight_tokens = _in_flight_limit(manager)
    lookahead = coordinator.num_reprefillable_tokens
    return Header(
        oplog=4,
        dialect=NAME,
        feature=FEATURE,
        num_blocks=pool.num_gpu_blocks,
        groups=groups,
        hash="sha256_cbor",
        hash_block_size=pool.hash_block_size,
        scheduler_block_size=coordinator.scheduler_block_size,
        hash_lookahead=int(pool.num_hash_lookahead_tokens),
        caching=manager.enable_caching,
        eagle=manager.use_eagle,
        eagle_groups=[i for i, g in enumerate(manager.kv_cache_config.kv_cache_groups) if g.is_eagle_group],
        prefill_lookahead=lookahead + 1 if lookahead else 0,
        retention_interval=coordinator.retention_interval,
        partial_hits=bool(coordinator.enable_partial_hash_hits),
        max_model_len=manager.max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        context_parallel=ranks,
        watermark=(manager.watermark_blocks + 0.5) / pool.num_gpu_blocks if manager.watermark_blocks else 0.0,
        shared_prefix_checkpoint=manager.mamba_shared_prefix_checkpoint,
        bugs=sorted(MANAGER_BUGS),
        zeroing=bool(manager.kv_cache_config.needs_kv_cache_zeroing),
        offloads=bool(offering(manager)),
    )


def offering(manager: Any) -> list[Any]:
    """The managers of groups whose states a connector is offered: recurrent ones, by position."""
    singles = manager.coordinator.single_type_managers if manager.enable_caching else ()
    return [single for single in singles if getattr(single, "mamba_cache_mode", "") == "align"]


def _entry(index: int, group: Any, single: Any) -> dict[str, Any]:
    """One entry of `groups`."""
    spec, name = group.kv_cache_spec, f"groups[{index}]"
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        spec = _uniform(name, list(inner.values()))
    kind = (REPLAYED if spec.prefix_replay_tokens else KINDS_BY_CLASS).get(type(spec).__name__)
    if kind is None:
        raise UnsupportedConfigError(name, type(spec).__name__, f"one of {', '.join(KINDS_BY_CLASS)}")
    if (role := getattr(group.role, "name", "DEFAULT")) != "DEFAULT":
        raise UnsupportedConfigError(name, f"role {role}", "role DEFAULT")
    cls, layer = KINDS[kind], kinds.of_kind(kind)
    entry: dict[str, Any] = {"kind": kind, "block_size": spec.block_size}
    names = {ours: theirs for theirs, ours in layer.vllm_fields.items()}
    for field in cls.written.fields:
        if field == "cp_sharded":
            entry[field] = bool(spec.dcp_sharded)
        elif field == "encoder_len":
            entry[field] = single.block_pool.num_gpu_blocks * spec.block_size  # more, no request is ever granted
        elif field == "cache_mode":
            entry |= _mode(name, spec.mamba_cache_mode)
        elif (value := getattr(spec, names.get(field, field))) or field not in layer.later_log_fields:
            entry[field] = value
    named = {other.written.variant: kinds.layer_class(other).vllm_name for other in log_variants(cls)}
    entry |= {variant: True for variant, theirs in named.items() if theirs == type(spec).__name__}
    if not cls.prefix_cacheable and single.kv_cache_spec.prefix_cacheable:
        raise UnsupportedConfigError(name, type(spec).__name__, "a group that is never cached, as its kind is")
    return entry


def _mode(name: str, mode: str) -> dict[str, str]:
    if mode not in ("align", "none"):
        raise UnsupportedConfigError(name, f"mamba_cache_mode {mode}", "align or none")
    return {} if mode == "align" else {"cache_mode": mode}


def _uniform(name: str, specs: list[Any]) -> Any:
    """The spec that stands for all of a `UniformTypeKVCacheSpecs`: those differ in bytes alone."""
    kinds = {type(spec).__name__ for spec in specs}
    if len(kinds) > 1:
        raise UnsupportedConfigError(
            name, f"UniformTypeKVCacheSpecs of {', '.join(sorted(kinds))}", "one class of specs"
        )
    return specs[0]


def _check_alike(manager: Any, groups: list[dict[str, Any]]) -> None:
    """Groups that a log cannot tell apart are looked up together; they must be for vLLM as well.

    Raises:
      UnsupportedConfigError: not so.
    """
    if len(groups) == 1 or not manager.enable_caching:
        return
    members = {id: index for index, group in enumerate(manager.coordinator.attention_groups) for id in group.group_ids}
    looked_up: dict[str, set[int]] = collections.defaultdict(set)
    for group, entry in enumerate(groups):
        if group in members:
            looked_up[repr(sorted(entry.items(), key=str))].add(members[group])
    for entry, together in looked_up.items():
        if len(together) > 1:
            raise UnsupportedConfigError("groups", entry, "groups that vLLM looks up together where they are alike")


def _in_flight_limit(manager: Any) -> int | None:
    """A number of tokens in flight for which every group's admission cap is the manager's; None for no cap."""
    singles = [
        each for each in manager.coordinator.single_type_managers if each.max_admission_blocks_per_request is not None
    ]
    if not singles:
        return None
    made, longest = [each.max_admission_blocks_per_request for each in singles], manager.max_model_len

    def caps(tokens: int) -> Iterator[int]:
        fields = {"max_in_flight_tokens": tokens, "max_model_len": longest}
        return (each.kv_cache_spec.max_admission_blocks_per_request(**fields) for each in singles)

    # Caps grow with the tokens in flight.
    least = 1 + bisect.bisect_left(range(1, longest), True, key=lambda n: all(map(operator.ge, caps(n), made)))
    most = bisect.bisect_left(range(1, longest + 1), True, key=lambda n: any(map(operator.gt, caps(n), made)))
    if least > most:
        raise UnsupportedConfigError(
            "max_in_flight_tokens", None, "one number that explains every group's admission cap"
        )
    return most


# Facts of a live `KVCacheManager` and its requests at one moment, taken before they change.
#
# The observed thread takes these and nothing more; `observer.py` makes operations of them, later and elsewhere. Each
# is taken with few bytecodes: a running request is looked at in every step.

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
lists of both, which only grow but for those of streaming sessions, of which these are copies (`SessionTurn`)."""


class SessionTurn(list[int]):
    """Tokens of a streaming session, with the length of its prompt and the number of its multimodal items."""

    prompt: int
    items: int


def turn_of(request: Any) -> SessionTurn:
    """A copy of a streaming session's tokens as they are now."""
    turn = SessionTurn(request._all_token_ids)
    turn.prompt, turn.items = request.num_prompt_tokens, len(request.mm_features)
    return turn


def see(request: Any) -> Seen:
    """The request as it is now."""
    tokens, hashes = request._all_token_ids, request.block_hashes
    if request.resumable:
        tokens, hashes = turn_of(request), hashes.copy()
    return request, request.num_computed_tokens, len(tokens), len(hashes), tokens, hashes


def marker(manager: Any, whole: bool) -> Callable[[], Mark]:
    """A function that takes a mark of a manager, of its whole state if `whole`."""
    coordinator, pool, queue = manager.coordinator, manager.block_pool, manager.block_pool.free_block_queue
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
        state = state_of(manager)
        return (*mark(), state.refs, state.rows, state.cached, state.free)

    return mark_of_all if whole else mark


def state_of(manager: Any) -> CacheState:
    """The whole state; rows stand under vLLM's own ids."""
    groups = manager.coordinator.single_type_managers
    return vllm_objects.state(manager, dict.fromkeys(id for group in groups for id in group.req_to_blocks))
