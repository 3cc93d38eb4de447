"""Observation of a live SGLang: what its caches ask of their tree, and what the tree answers.

SGLang takes the core of a cache by name, and so does this: the name stands for the core that the cache would have, in
Rust or in Python, whose methods say each call to a sink. So a log is of the tree alone: slots come with what is
entered, and every answer says which of them leave. What a tree has on the host or lends to sessions has no words in a
log: it ends there, and the tree goes on.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.attach import Session, Sink, fits_a_log, observe_share
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS, COMPONENTS, FULL, MAMBA, SWA
from hkv.dialects.sglang.engines import live_tree, require_sglang
from hkv.errors import ConfigError

BACKEND = "hkv"
"""Beginning of the names under which observed cores are registered."""

STATES_EVERY = {"all": 1, "step": 8, "digest": 64}
"""Calls after which a state is recorded, by the session's setting; a tree has no steps."""

UNTOLD = (
    *("insert_host", "commit_hicache_transfers", "commit_backup", "commit_load_back", "finish_load_back"),
    *("set_hicache_enabled", "set_host_memory_buffer_only", "demote", "drop_subtree_no_host", "attach_swa_window"),
    *("inc_host_lock_ref", "dec_host_lock_ref", "inc_full_pin", "dec_full_pin", "dec_window_lock_only"),
    *("mark_external_cache_stored_path", "mark_external_linker_offload_pending", "finish_external_linker_offload"),
    *("mark_write_through_pending", "finish_mamba_state_eviction", "finish_swa_state_eviction"),
    *("adjust_component_size",),
)
"""Methods of a core that change what a log has no words for."""


def attach(params: Any, session: Session) -> CoreObserver:
    """Observes the cache that is going to be made of some `CacheInitParams`, from its first call on.

    Raises:
      ConfigError: another release of SGLang; a cache for which a log has no words.
    """
    from sglang.srt.mem_cache.unified_cache import tree_core_registry

    require_sglang()
    header = header_of(params)
    dialect = registry.dialect_of(structs.NAME)
    dialect.log.check(header)
    observer = CoreObserver(header, params, session.sink(dialect), session.states)
    inner = tree_core_registry.select_tree_core_backend(params)

    def core(given: Any, components: Any) -> Any:
        return observer.hook(tree_core_registry.create_tree_core(inner, given, components))

    params.tree_core_backend = f"{BACKEND}-{len(tree_core_registry.registered_tree_core_backends())}"
    tree_core_registry.register_tree_core_backend(params.tree_core_backend, core)
    session.observe(observer)
    return observer


def attach_all(session: Session) -> Callable[[], None]:
    """Observes every cache that this process makes, until the function is called that it returns."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    made = UnifiedRadixCache.__init__

    @functools.wraps(made)
    def observed(cache: Any, params: Any) -> None:
        observe_share(session, type(cache).__name__, lambda: attach(params, session))
        made(cache, params)

    UnifiedRadixCache.__init__ = observed  # type: ignore[method-assign]
    return functools.partial(setattr, UnifiedRadixCache, "__init__", made)


def header_of(params: Any) -> structs.Header:
    """The header of a cache's log.

    Raises:
      ConfigError: a log has no words for it.
    """
    names = [component.name for component in params.tree_components or ()]
    if names != [name for name in COMPONENTS if name in names] or FULL not in names:
        raise ConfigError("tree_components", names, f"some of {', '.join(COMPONENTS)}, {FULL} first")
    for name, plain in {
        "disable": False,
        "enable_session_radix_cache": False,
        "swa_gates_prefix_match": True,
        "component_registry_override": None,
    }.items():
        if (getattr(params, name) or plain) != plain:
            raise ConfigError(name, getattr(params, name), f"{plain}: no log has words for more")
    allocator, size = params.token_to_kv_pool_allocator, params.page_size
    groups: list[dict[str, Any]] = [{"kind": structs.FULL_ATTENTION, "block_size": size}]
    blocks = [allocator.size_full // size]
    if SWA in names:
        groups.append({"kind": structs.SLIDING_WINDOW, "block_size": size, "window": params.swa_retain_window})
        blocks.append(allocator.size_swa // size)
    most = -1
    if MAMBA in names:
        from sglang.srt.runtime_context import get_exec

        most = get_exec().mamba.mamba_max_states_per_path
        groups.append({"kind": structs.STATES, "block_size": size})
        blocks.append(params.req_to_token_pool.mamba_allocator.size)
    return structs.Header(
        dialect=structs.NAME,
        feature="live",
        num_blocks=blocks,
        groups=groups,
        policy=params.eviction_policy.lower(),
        eagle=params.is_eagle,
        tracked=params.enable_mamba_extra_buffer,
        most_states=most,
        bugs=sorted(BUGS),
        tree=True,
    )


class CoreObserver:
    """One core under observation.

    Args:
      header: of its log.
      params: of its cache.
      sink: takes its operations.
      states: those that are told (`hkv.contract.attach.Session`).
    """

    def __init__(self, header: structs.Header, params: Any, sink: Sink, states: str) -> None:
        self._header, self._states, self._sink = header, states, sink
        self._allocator = params.token_to_kv_pool_allocator
        self._whole = frozenset(COMPONENTS[structs.KINDS.index(group["kind"])] for group in header.groups)
        self._windowed = SWA in self._whole
        self._put = sink.calls_to(lambda call: sink.operation(*call))
        self._core: Any = None
        self._told = 0
        self._ended = False
        self._forget()
        sink.begin(header)

    def hook(self, core: Any) -> Any:
        """The core, its methods hooked."""
        self._core = core
        for name in ("reset", "match_prefix", "begin_insert", "resume_insert", "end_insert", "inc_lock_ref"):
            self._wrap(name, getattr(self, f"_{name}"))
        for name in ("dec_lock_ref", "dec_swa_lock_only", "evict_device_start", "evict_device_next_node"):
            self._wrap(name, getattr(self, f"_{name}"))
        for name in ("evict_device_leaf", "evict_device_end", "evict_excess_path_states", "set_component_device_value"):
            self._wrap(name, getattr(self, f"_{name}"))
        for name in UNTOLD:
            self._wrap(name, functools.partial(self._untold, name))
        return core

    def close(self) -> None:
        """Says the last state, and ends the observation; the core goes on."""
        if self._states != "none":
            self._tell_state()
        self._end()

    def _wrap(self, name: str, observed: Callable[..., Any]) -> None:
        method = getattr(self._core, name)

        @functools.wraps(method)
        def call(*given: Any, **named: Any) -> Any:
            return method(*given, **named) if self._ended else observed(method, *given, **named)

        setattr(self._core, name, call)

    def _end(self, reason: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        if reason:  # and no state after it: what a log has no words for has changed the tree
            self._put((structs.EndedOp(reason=reason), None))
        self._sink.close()

    def _untold(self, name: str, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self._end(f"{name} was called, for which a log has no words")
        return method(*given, **named)

    def _tell(self, operation: Any, answer: Any = None) -> None:
        if self._ended:
            return
        self._put((operation, answer))
        self._told += 1
        if (
            not isinstance(operation, structs.StateOp)
            and self._told % STATES_EVERY.get(self._states, self._told + 1) == 0
        ):
            self._tell_state()
        self._sink.step_ends()

    def _tell_state(self) -> None:
        """The nodes, where the core shows them: SGLang's in Rust does not."""
        if hasattr(self._core, "lru_lists") and not self._ended:
            shown = live_tree.tree(self._core, structs.to_config(self._header))
            self._tell(structs.StateOp(), structs.State([], [], {}, *shown))

    def _forget(self) -> None:
        self._named, self._locks = set[int](), 0
        self._held: dict[Any, list[str]] = {}
        self._entering: tuple[structs.InsertOp, Any] | None = None
        self._walk: tuple[Any, int] = None, 0
        self._steps = 0
        self._gone = structs.Gone([], [], [])

    # Calls

    def _reset(self, method: Callable[[], None]) -> None:
        method()
        self._forget()
        self._tell(structs.ResetOp())

    def _match_prefix(self, method: Callable[[Any], Any], params: Any) -> Any:
        keyed = self._keyed(params.key)
        found = method(params)
        node = found.last_device_node
        slots = self._core.collect_full_device_indices(node, self._core.root_node_handle()).tolist()
        self._named.add(node)
        answer = structs.Found(found.device_prefix_len, found.full_kv_hit_length, slots)
        self._tell(structs.MatchOp(node=node, **keyed), answer)
        return found

    def _begin_insert(self, method: Callable[[Any], Any], params: Any) -> Any:
        slots = params.value.tolist()
        mapping = self._allocator.full_to_swa_index_mapping if self._windowed else None
        evicted = params.component_evicted_seqlens
        operation = structs.InsertOp(
            **self._keyed(params.key),
            node=-1,
            slots=slots,
            window=[] if mapping is None else mapping[params.value].tolist(),
            owned=params.prev_prefix_len,
            evicted=next((length for component, length in evicted.items() if component.name == SWA), 0),
            counted=params.inserted_len,
            priority=params.priority or 0,
            state=None if params.mamba_value is None else int(params.mamba_value[0]),
        )
        self._entering, self._gone = (operation, None), structs.Gone([], [], [])
        return self._insert_step(method(params))

    def _resume_insert(self, method: Callable[[], Any]) -> Any:
        return self._insert_step(method())

    def _insert_step(self, step: Any) -> Any:
        self._acted(step.actions)
        if step.result is not None and self._entering is not None:
            self._entering = self._entering[0], step.result
        return step

    def _end_insert(self, method: Callable[[], Any]) -> Any:
        actions = method()
        self._acted(actions)
        if self._entering is not None:
            operation, result = self._entering
            self._entering = None
            if result is None:
                self._end("an insert failed")
                return actions
            operation.node = result.last_device_node
            self._named.add(operation.node)
            took = operation.state is not None and not result.mamba_exist
            self._tell(operation, structs.Entered(result.prefix_len, took, self._gone))
        return actions

    def _inc_lock_ref(self, method: Callable[..., Any], node: int, skipped: Sequence[Any] = ()) -> Any:
        result = method(node, skipped)
        parts = self._parts(result)
        if node not in self._named or parts not in (self._whole, self._whole - {MAMBA}):
            self._end("a lock on a node that no call answered, or on the state alone")
            return result
        self._locks += 1
        name, marks = f"l{self._locks}", _marks(result)
        self._tell(structs.LockOp(id=name, node=node), structs.Held(marks is not None))
        if parts != self._whole:
            self._tell(structs.ReleaseStateOp(id=name))
        self._held.setdefault((node, marks, parts), []).append(name)
        return result

    def _dec_lock_ref(self, method: Callable[..., Any], node: int, params: Any, skip_swa: bool = False) -> Any:
        result = method(node, params, skip_swa)
        parts = self._parts(params)
        if parts == {MAMBA}:
            # An allocation took the state that it had copied (`_alloc_mamba_slot`, `extra_buffer_lazy`).
            self._give_back(node, params, self._whole, structs.ReleaseStateOp)
        else:
            self._give_back(node, params, parts & {FULL} if skip_swa and self._windowed else parts, structs.UnlockOp)
        return result

    def _dec_swa_lock_only(self, method: Callable[..., Any], node: int, params: Any) -> Any:
        result = method(node, params)
        if result.device_frees or result.cache_actions:
            self._end("something was freed as a window's lock was given back")
        elif self._windowed:
            self._give_back(node, params, self._parts(params), structs.ReleaseWindowOp)
        return result

    def _parts(self, receipt: Any) -> frozenset[str]:
        """Components that a receipt is about."""
        return self._whole - {component.name for component in receipt.skipped_lock_components}

    def _give_back(self, node: int, receipt: Any, held: frozenset[str], operation: Any) -> None:
        """Tells that a lock on these components is undone, or a part of it; locks that hold the same are alike."""
        marks = _marks(receipt)
        if not self._held.get((node, marks, held)):
            self._end("a lock was undone that was not taken")
            return
        name = self._held[node, marks, held].pop()
        if operation is not structs.UnlockOp:
            left = held - {MAMBA} if operation is structs.ReleaseStateOp else frozenset({FULL})
            self._held.setdefault((node, marks, left), []).append(name)
        self._tell(operation(id=name))

    def _evict_device_start(self, method: Callable[..., None], component: Any, count: int) -> None:
        method(component, count)
        self._walk, self._steps, self._gone = (component, count), 0, structs.Gone([], [], [])

    def _evict_device_next_node(self, method: Callable[..., Any], component: Any, tracker: Any) -> Any:
        result = method(component, tracker)
        self._freed(result)
        # A walk that finds nothing although more is wanted is a step, too: then nothing may be left.
        short = tracker.get(component, 0) < self._walk[1]
        self._steps += result.made_progress or result.node_id is not None or short
        return result

    def _evict_device_leaf(self, method: Callable[..., Any], *given: Any) -> Any:
        result = method(*given)
        self._freed(result)
        return result

    def _evict_device_end(self, method: Callable[..., None], component: Any) -> None:
        method(component)
        if self._steps:
            kind = structs.KINDS[COMPONENTS.index(component.name)]
            self._tell(structs.LeaveOp(kind=kind, steps=self._steps), self._gone)
        self._steps = 0

    def _evict_excess_path_states(
        self, method: Callable[..., None], tail: int, device: Any, *given: Any, **named: Any
    ) -> None:
        before = {component: len(values) for component, values in device.items()}
        method(tail, device, *given, **named)
        for component, values in device.items():
            self._note(component.name, values[before.get(component, 0) :])
        if self._entering is None:
            self._end("states of a path left outside of an insert")

    def _set_component_device_value(self, method: Callable[..., None], *given: Any) -> None:
        method(*given)
        if self._entering is None:
            self._end("slots were given to a node outside of an insert")

    # What leaves

    def _freed(self, result: Any) -> None:
        for component, values in result.device_frees.items():
            self._note(component.name, values)
        self._acted(result.cache_actions)

    def _note(self, component: str, values: Sequence[Any]) -> None:
        place = (self._gone.full, self._gone.window, self._gone.states)[COMPONENTS.index(component)]
        for each in values:
            place += each.tolist()

    def _acted(self, actions: Sequence[Any]) -> None:
        """Notes what actions free; they are performed by the cache."""
        for action in actions:
            match type(action).__name__:
                case "FreeDeviceKV":
                    self._note(FULL, action.indices)
                    if self._windowed:
                        self._note(SWA, action.indices)
                case "FreeDeviceKVFullOnly":
                    self._note(FULL, action.indices)
                case "FreeComponentDeviceSlot":
                    self._note(action.component_type.name, action.indices)
                case "RecoverSWAWithLockedFull":
                    self._note(FULL, [action.incoming_full])
                case "SWARebuild" | "MambaEvictExcessPathStates" | "UpdatePendingBackupOnNodeSplit":
                    pass
                case name:
                    self._end(f"the tree asked for {name}, for which a log has no words")

    def _keyed(self, key: Any) -> dict[str, Any]:
        tokens = list(key.raw_token_ids())
        if not fits_a_log(tokens):
            self._end("a token id of more than 32 bits")
        return {"tokens": tokens, "adapter": key.extra_key, "salt": key.cache_salt}


def _marks(receipt: Any) -> Any:
    """The mark at which a lock's part on the window ends; None for none."""
    return next((mark for component, mark in receipt.component_lock_uuids.items() if component.name == SWA), None)
