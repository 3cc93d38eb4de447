"""Makes SGLang's own objects from HKV's descriptions and reads them back; every import of SGLang stands in here."""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import logging
import sys
import types
import warnings
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import FULL, MAMBA, SWA, SGLangConfig
from hkv.dialects.sglang.engines import of_components

UNUSED = ("torchvision", "compressed_tensors")
"""Packages that SGLang imports on the way to its cache, which uses nothing of them."""

ROWS, ROW_TOKENS = 64, 1 << 14
"""Requests that run at a time, and the most tokens of each."""


class _AbsentClass(type):
    """Type of a class that has every name, each of which is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentClass(name, (), {})


class _Absent(types.ModuleType):
    """A module that has every name."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentClass(name, (), {})


class _AbsentFinder:
    """Finds the packages of `UNUSED` that are not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] in UNUSED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of kernels for devices that are not there
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401 - looks for torchvision by itself, and must not find what stands in for it
    sys.meta_path.append(_AbsentFinder())  # type: ignore[arg-type]
    import torch
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.common import evict_from_tree_cache
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler


def be_quiet() -> None:
    """Has SGLang log nothing below what is critical: a refused allocation is an answer, not an error."""
    logging.getLogger("sglang").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A context of its own: what is published meanwhile is not what a live server in this process runs by."""
    from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context

    with use_context(RuntimeContext(parallel=ParallelContext())):
        yield


class _NoMemory(BaseSWAKVPool):
    """Two pools without memory, as far as an allocator asks for them."""

    swa_req_ring_size = None

    def __init__(self) -> None:
        self.full_kv_pool = self.swa_kv_pool = None

    def register_mapping(self, mapping: torch.Tensor) -> None:
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, slots: torch.Tensor) -> torch.Tensor:
        return self.full_to_swa_index_mapping[slots]


_NoMemory.__abstractmethods__ = frozenset()


class RowTable(HybridReqToTokenPool):
    """The table of rows, and the states' bookkeeping without states (`HybridReqToTokenPool`)."""

    def __init__(self, config: SGLangConfig) -> None:
        self.mamba_allocator = MambaSlotAllocator(config.states or 0, "cpu")
        self.mamba_pool = SimpleNamespace(replayssm_write_pos=None, copy_from=lambda source, target: None)
        self.mamba_ping_pong_track_buffer_size = 2
        self.mamba_initial_tracking_slots = 2 if config.tracked else 0
        self.enable_mamba_extra_buffer = config.tracked
        self.enable_mamba_extra_buffer_lazy = False
        self.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros((ROWS, 2), dtype=torch.int64)
        # No row is longer than the pool, and seeds of a comparison have small ones: collected late, they add up.
        self.req_to_token = torch.zeros((ROWS, min(ROW_TOKENS, config.num_slots[0])), dtype=torch.int64)
        self._free = list(range(ROWS))

    def write(self, place: Any, slots: torch.Tensor) -> None:
        self.req_to_token[place] = slots

    def take(self) -> int:
        """A free row."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Frees a row."""
        self._free.append(row)


def params_of(config: SGLangConfig, backend: str) -> CacheInitParams:
    """Parameters of an empty cache with that tree; it records KV events (`take_events`)."""
    arguments = ServerArgs(model_path="dummy", page_size=config.page_size)
    arguments._mamba_cache_chunk_size = config.page_size
    arguments.mamba_max_states_per_path = config.most_states
    set_global_server_args_for_scheduler(arguments)
    given: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "need_sort": config.need_sort}
    if config.window is not None:
        allocator: Any = SWATokenToKVPoolAllocator(*config.num_slots, config.page_size, kvcache=_NoMemory(), **given)
        parts = [allocator.full_attn_allocator, allocator.swa_attn_allocator]
    elif config.page_size == 1:
        allocator = TokenToKVPoolAllocator(config.num_slots[0], kvcache=None, **given)
        parts = [allocator]
    else:
        allocator = PagedTokenToKVPoolAllocator(config.num_slots[0], config.page_size, kvcache=None, **given)
        parts = [allocator]
    for part in parts:
        part.use_triton_kernels = False
    return CacheInitParams(
        disable=False,
        req_to_token_pool=RowTable(config),
        token_to_kv_pool_allocator=allocator,
        page_size=config.page_size,
        is_eagle=config.eagle,
        eviction_policy=config.policy,
        sliding_window_size=config.window,
        enable_mamba_extra_buffer=config.tracked,
        tree_components=tuple(ComponentType[name] for name in config.components),
        tree_core_backend=backend,
        enable_kv_cache_events=True,
    )


def cache(params: CacheInitParams) -> UnifiedRadixCache:
    """A cache of these parameters."""
    made = UnifiedRadixCache(params)
    made.pretty_print = lambda: None  # SGLang prints its tree before it refuses
    return made


def tensor(slots: Sequence[int]) -> torch.Tensor:
    """Slots as SGLang keeps them."""
    return torch.tensor(slots, dtype=torch.int64)


def match(made: UnifiedRadixCache, keyed: structs.Keyed, tokens: list[int], request: Any = None) -> Any:
    """The longest prefix of some tokens that SGLang has cached; a request gets a state of its own for the one found."""
    key = RadixKey(array("q", tokens), keyed.adapter, cache_salt=keyed.salt)
    return made.match_prefix(MatchPrefixParams(key=key, cow_mamba=request is not None, req=request))


def insert(made: UnifiedRadixCache, allocator: Any, operation: structs.InsertOp) -> None:
    """Enters tokens with slots that SGLang's pools know nothing of."""
    slots = tensor(operation.slots)
    if operation.window:
        allocator.full_to_swa_index_mapping[slots] = tensor(operation.window)
    key = RadixKey(array("q", operation.tokens), operation.adapter, made.tree_core.is_eagle, cache_salt=operation.salt)
    made.insert(
        InsertParams(
            key,
            slots,
            None if operation.state is None else tensor([operation.state]),
            prev_prefix_len=operation.owned,
            component_evicted_seqlens={ComponentType.SWA: operation.evicted},
            inserted_len=operation.counted,
            priority=operation.priority,
        )
    )


def take_all(allocator: Any) -> None:
    """Leaves nothing free in SGLang's pools, so that it can be given back what was never taken."""
    for part in (
        getattr(allocator, "full_attn_allocator", allocator),
        getattr(allocator, "swa_attn_allocator", allocator),
    ):
        part.free_pages = part.free_pages[:0]


def release_state(made: UnifiedRadixCache, lock: Any) -> None:
    """Gives back a lock's part on the state alone, as `_alloc_mamba_slot` does under `extra_buffer_lazy`."""
    others = tuple(component for component in made.tree_components if component is not ComponentType.MAMBA)
    made.dec_lock_ref(lock.node, dataclasses.replace(lock.receipt, skipped_lock_components=others))
    lock.receipt.skipped_lock_components += (ComponentType.MAMBA,)


def leave(made: UnifiedRadixCache, name: str, steps: int) -> None:
    """Lets so many nodes leave for a component's sake."""
    component, tracker = ComponentType[name], dict.fromkeys(made.tree_components, 0)
    made.tree_core.evict_device_start(component, 1 << 40)
    for _ in range(steps):
        node, moved = made._evict_device_next_node(component, tracker)
        if node is not None:
            made._evict_device_leaf(node, tracker)
        elif not moved:
            break
    made.tree_core.evict_device_end(component)


def request(operation: structs.AdmitOp, row: int) -> Any:
    """A request, with what the cache asks of one (`Req`)."""
    made = SimpleNamespace(
        rid=operation.id,
        kv=ReqKvInfo(req_pool_idx=row),
        priority=operation.priority,
        extra_key=operation.adapter,
        cache_salt=operation.salt,
        origin_input_ids=array("q", operation.tokens),
        full_untruncated_fill_ids=array("q", operation.tokens),
        last_node=None,
        swa_branching_seqlen=None,
        computed=0,
        done=False,
        ran=False,
        session=None,
        session_id=None,
        kv_rotation_base=None,
    )
    made.finished = lambda: made.done
    made.get_fill_ids = lambda: made.full_untruncated_fill_ids[: made.computed]
    return made


def hold_states(made: UnifiedRadixCache, rows: RowTable, request: Any) -> None:
    """States for a request's first pass, as SGLang's scheduler gets them (`alloc_req_slots`)."""
    request.ran = True
    if not made.supports_mamba():
        return
    allocation.ensure_mamba_capacity(rows, [request], made)
    if not request.kv.holds_mamba:
        request.kv.mamba_pool_idx = rows.mamba_allocator.alloc(1)[0]
    if rows.enable_mamba_extra_buffer and request.kv.mamba_ping_pong_track_buffer is None:
        rows._alloc_ping_pong_buffer(request)
        rows.req_index_to_mamba_ping_pong_track_buffer_mapping[request.kv.req_pool_idx] = (
            request.kv.mamba_ping_pong_track_buffer
        )


def release(made: UnifiedRadixCache, rows: RowTable, request: Any, *, entered: bool) -> None:
    """Gives back what a request has besides slots; before its first pass that is the state of its match, if any."""
    if request.ran:
        made.on_release(request, checkpointed=entered)
    elif request.kv.holds_mamba:
        rows.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(-1))


def track(rows: RowTable, request: Any, length: int, *, decode: bool = False) -> None:
    """A pass keeps a state (`_mamba_radix_cache_v2_req_prepare_for_extend`, `_mamba_prefix_cache_update`)."""
    kv = request.kv
    kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen if decode else None
    kv.mamba_last_track_seqlen = length
    kv.mamba_last_track_idx = kv.mamba_next_track_idx
    kv.mamba_next_track_idx = rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)


def states(request: Any) -> list[int]:
    """A request's own state, and those that keep what it was."""
    own, kept = request.kv.mamba_pool_idx, request.kv.mamba_ping_pong_track_buffer
    return ([] if own is None else [int(own)]) + ([] if kept is None else kept.tolist())


def allocate(
    made: UnifiedRadixCache, config: SGLangConfig, start: int, end: int, last: int, *, decode: bool
) -> list[int] | None:
    """Slots for tokens start..end as SGLang's scheduler gets them, None where it runs out of memory."""
    first, length = tensor([start]), tensor([end])
    try:
        if config.page_size == 1:
            slots = allocation.alloc_token_slots(made, end - start)
        elif decode:
            slots = allocation.alloc_paged_token_slots_decode(made, length, length, tensor([last]))
        else:
            given = (first, first, length, length, tensor([last]))
            slots = allocation.alloc_paged_token_slots_extend(made, *given, end - start)
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        return None
    return slots.tolist()


def evict(made: UnifiedRadixCache, config: SGLangConfig, tokens: Sequence[int]) -> list[int]:
    """Tokens that SGLang frees of each pool when so many are asked for."""
    asked = dict(zip(config.components, tokens, strict=True))
    params = EvictParams(num_tokens=asked[FULL], swa_num_tokens=asked.get(SWA, 0), mamba_num=asked.get(MAMBA, 0))
    freed = made.evict(params)
    each = (freed.num_tokens_evicted, freed.swa_num_tokens_evicted, freed.mamba_num_evicted)
    return of_components(config, *each)


def room(made: UnifiedRadixCache, config: SGLangConfig, rows: RowTable, tokens: int) -> tuple[list[int], list[int]]:
    """Tokens of each pool that are free, and that nobody holds, once so many have been looked for."""
    evict_from_tree_cache(made, tokens)
    allocator = made.token_to_kv_pool_allocator
    full, window = allocator.available_size(), 0
    if config.window is not None:
        full, window = allocator.full_available_size(), allocator.swa_available_size()
    states = 0 if config.states is None else rows.mamba_allocator.available_size()
    idle = of_components(config, made.full_evictable_size(), made.swa_evictable_size(), made.mamba_evictable_size())
    return of_components(config, full, window, states), idle


def told(made: UnifiedRadixCache, groups: int) -> tuple[list[int], list[int]]:
    """Pages of full attention that KV events since the last time tell of; of other groups they tell nothing."""
    counts = dict.fromkeys(("BlockStored", "BlockRemoved"), 0)
    for event in made.take_events():
        if (name := type(event).__name__) in counts:
            counts[name] += len(event.block_hashes)
    stored, removed = ([count] + [0] * (groups - 1) for count in counts.values())
    return stored, removed


def pools(allocator: Any, config: SGLangConfig, rows: RowTable) -> tuple[list[structs.Pool], list[tuple[int, int]]]:
    """Free pages of each pool, and the window slots of full ones."""

    def one(part: Any) -> structs.Pool:
        waiting = [part.release_pages] if config.page_size == 1 else part.staged_pages
        return structs.Pool(part.free_pages.tolist(), [page for pages in waiting for page in pages.tolist()])

    free = [] if config.states is None else [structs.Pool(rows.mamba_allocator.free_slots.tolist(), [])]
    if config.window is None:
        return [one(allocator), *free], []
    mapping = allocator.full_to_swa_index_mapping.tolist()[:-1]
    parts = [allocator.full_attn_allocator, allocator.swa_attn_allocator]
    return [*map(one, parts), *free], [(slot, other) for slot, other in enumerate(mapping) if other]


def available(made: UnifiedRadixCache, config: SGLangConfig, allocator: Any, rows: RowTable) -> int:
    """Pages of all pools, and states, that are free or that nobody holds."""
    if config.window is None:
        tokens = allocator.available_size() + made.full_evictable_size()
    else:
        full = allocator.full_available_size() + made.full_evictable_size()
        tokens = full + allocator.swa_available_size() + made.swa_evictable_size()
    states = 0 if config.states is None else rows.mamba_allocator.available_size() + made.mamba_evictable_size()
    return tokens // config.page_size + states


def ledgers(core: Any, config: SGLangConfig) -> list[structs.Ledger]:
    """Tokens, and states, of each component that SGLang counts as evictable and as protected, in either tree."""
    components = [ComponentType[name] for name in config.components]
    return [
        structs.Ledger(core.component_evictable_size(component), core.component_protected_size(component))
        for component in components
    ]
