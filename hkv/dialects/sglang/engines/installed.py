"""Drives an installed SGLang's own `UnifiedRadixCache`, so that HKV can be held against the engine it describes.

Only the cache runs: its tree, whichever of the two that SGLang ships, its allocators and its table of rows, on the CPU.
What the scheduler does around them is done here, by the scheduler's own functions where they take no batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS, COMPONENTS
from hkv.dialects.sglang.engines import RELEASE, live_tree, require_sglang
from hkv.dialects.sglang.log import to_config
from hkv.errors import ConfigError, OperationError


class InstalledSGLangEngine:
    """SGLang 0.5.23's cache with its tree in Python, as an engine of the log format.

    Args:
      header: the configuration, as a log's first line.
      release: the version that SGLang must have, whatever its rules; None for 0.5.23.

    Attributes:
      header: the same.
      params: of the cache, which is made of them when it is first asked.

    Raises:
      ConfigError: SGLang is not installed, or another release of it; a configuration that it cannot represent; defects
        of 0.5.23 that the header does not name, or others.
    """

    backend = "python"

    def __init__(self, header: structs.Header, release: str | None = None) -> None:
        require_sglang(release)
        from hkv.dialects.sglang.engines import sglang_objects

        if set(header.bugs) != set(BUGS):
            raise ConfigError("bugs", header.bugs, f"those of SGLang {RELEASE}: {', '.join(BUGS)}")
        sglang_objects.be_quiet()
        self.header, self._objects = header, sglang_objects
        self._config = to_config(header)
        self.params = sglang_objects.params_of(self._config, self.backend)
        self._rows, self._allocator = self.params.req_to_token_pool, self.params.token_to_kv_pool_allocator
        self._requests: dict[str, Any] = {}

    @functools.cached_property
    def _cache(self) -> Any:
        """The cache, made of `params` when it is first asked."""
        return self._objects.cache(self.params)

    def num_available(self) -> int:
        """Pages of all pools, and states, that are free or that nobody holds."""
        return self._objects.available(self._cache, self._config, self._allocator, self._rows)

    def published(self) -> bytes:
        """KV events since the last time, as SGLang's publisher sends them: one batch."""
        return msgspec.msgpack.encode([0.0, self._cache.take_events(), None])

    @property
    def lacks(self) -> tuple[str, ...]:
        """The tree, where it is not Python's own."""
        return () if self.backend == "python" else ("tree",)

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it cannot come now, or SGLang fails.
        """
        match operation:
            case structs.MatchOp():
                return self._found(self._objects.match(self._cache, operation, operation.tokens))
            case structs.AdmitOp():
                return self._admit(operation)
            case structs.EvictOp():
                return structs.Freed(self._objects.evict(self._cache, self._config, operation.tokens))
            case structs.StateOp():
                return self._state()
            case structs.RoomOp():
                return structs.Room(*self._objects.room(self._cache, self._config, self._rows, operation.tokens))
            case structs.EventsOp():
                return structs.Told(*self._objects.told(self._cache, len(self.header.groups)))
        return self._of_request(operation)

    def _of_request(self, operation: Any) -> Any:
        request = self._requests.get(operation.id)
        if request is None:
            raise OperationError("id", operation.id, "a request that runs")
        match operation:
            case structs.ExtendOp():
                answer = self._grow(request, operation.length)
                if answer.slots is not None and operation.track:
                    self._objects.track(self._rows, request, operation.track)
                return answer
            case structs.DecodeOp():
                answer = self._grow(request, request.computed + 1, decode=True)
                if answer.slots is not None:
                    request.full_untruncated_fill_ids.append(operation.token)
                    if operation.track:
                        self._objects.track(self._rows, request, request.computed, decode=True)
                return answer
            case structs.SlideOp():
                if self._config.window is not None:
                    self._cache.evict_sliding_windows(request, request.computed, eviction_interval=operation.every)
            case structs.CheckpointOp():
                self._cache.checkpoint(request, up_to=request.computed)
                return structs.Row(self._row(request), request.kv.cache_protected_len)
            case structs.ReleaseWindowOp():
                self._cache.release_swa_prefix_lock(request)
            case _:
                self._end(request, getattr(operation, "length", 0), entered=isinstance(operation, structs.FinishOp))
        return None

    def _found(self, result: Any) -> structs.Found:
        slots = self._cache.path_device_indices(result.last_device_node).tolist()
        return structs.Found(result.device_prefix_len, result.full_kv_hit_length, slots)

    def _admit(self, operation: structs.AdmitOp) -> structs.Found:
        if operation.id in self._requests:
            raise OperationError("id", operation.id, "a name that no running request has")
        if not operation.tokens:
            raise OperationError("tokens", [], "at least 1 token")
        request = self._requests[operation.id] = self._objects.request(operation, self._rows.take())
        result = self._objects.match(self._cache, operation, operation.tokens[:-1], request)
        found = self._found(result)
        request.last_node, request.swa_branching_seqlen = result.last_device_node, result.swa_branching_seqlen
        request.kv.cache_protected_len = found.hit
        request.lock = self._cache.lock(result.last_device_node)
        self._write(request, 0, found.slots)
        return found

    def _grow(self, request: Any, length: int, *, decode: bool = False) -> structs.Slots:
        start, known = request.computed, len(request.full_untruncated_fill_ids)
        if not decode and not start < length <= known:
            raise OperationError("length", length, f"from {start + 1} to {known} tokens")
        if not decode:
            self._objects.hold_states(self._cache, self._rows, request)
        if decode and start != known:
            raise OperationError("id", request.rid, "a request whose tokens all have slots")
        last = self._row(request)[-1] if start else -1
        slots = self._objects.allocate(self._cache, self._config, start, length, last, decode=decode)
        if slots is not None:
            self._write(request, start, slots)
        return structs.Slots(slots)

    def _end(self, request: Any, length: int, *, entered: bool) -> None:
        size, protected = self._config.page_size, request.kv.cache_protected_len
        least = protected + self._config.bigrams
        if length and not least <= length <= request.computed:
            raise OperationError("length", length, f"from {least} to {request.computed} tokens")
        length = length or request.computed
        del self._requests[request.rid]
        request.done = True
        if entered:
            self._cache.checkpoint(request, up_to=length)
        self._cache.free_kv_row(request.kv, [(request.kv.cache_protected_len, length)])
        self._cache.unlock(request.lock)
        if (beyond := -(-length // size) * size) < request.computed:
            self._cache.free_kv_row(request.kv, [(beyond, request.computed)])
        self._objects.release(self._cache, self._rows, request, entered=entered)
        self._rows.give_back(request.kv.req_pool_idx)

    def _row(self, request: Any) -> list[int]:
        return self._rows.req_to_token[request.kv.req_pool_idx, : request.computed].tolist()

    def _write(self, request: Any, start: int, slots: list[int]) -> None:
        end = start + len(slots)
        self._rows.write((request.kv.req_pool_idx, slice(start, end)), self._objects.tensor(slots))
        request.computed = request.kv.kv_allocated_len = request.kv.kv_committed_len = end

    def _state(self) -> structs.State:
        pools, window = self._objects.pools(self._allocator, self._config, self._rows)
        nodes, recent = live_tree.tree(self._cache.tree_core, self._config) if not self.lacks else (None, None)
        requests = {
            id: structs.Owned(
                self._row(request),
                request.kv.cache_protected_len,
                request.kv.cache_inserted_len,
                request.kv.max_evicted_seqlen,
                self._objects.states(request),
                request.kv.mamba_last_track_seqlen,
            )
            for id, request in self._requests.items()
        }
        ledgers = self._objects.ledgers(self._cache.tree_core, self._config)
        return structs.State(pools, window, requests, nodes, recent, ledgers)


class RustSGLangEngine(InstalledSGLangEngine):
    """The same with its tree in Rust, SGLang's default, which does not show it."""

    backend = "rust"


class InstalledTree:
    """SGLang 0.5.23's tree alone, under its own cache: what is entered brings slots, and the pools count for nothing.

    It is observed as a live one is, and answers what it is seen to do.

    Args:
      header: the configuration, as a log's first line.
      backend: `python` or `rust`.
      release: the version that SGLang must have, whatever its rules; None for 0.5.23.

    Raises:
      ConfigError: as of `InstalledSGLangEngine`.
    """

    def __init__(self, header: structs.Header, backend: str, release: str | None = None) -> None:
        require_sglang(release)
        from hkv.dialects.sglang.attach import CoreObserver
        from hkv.dialects.sglang.engines import sglang_objects

        self.header, self._objects = header, sglang_objects
        self.lacks = () if backend == "python" else ("tree",)
        self._answer: Any = None
        with sglang_objects.apart():
            params = sglang_objects.params_of(to_config(header), backend)
            self._cache, self._allocator = sglang_objects.cache(params), params.token_to_kv_pool_allocator
        CoreObserver(header, params, self, "none").hook(self._cache.tree_core)
        self._nodes: dict[int, int] = {}
        self._locks: dict[str, Any] = {}

    # A sink that keeps the last answer (`hkv.contract.attach.Sink`).

    def calls_to(self, perform: Callable[[Any], None]) -> Callable[[Any], None]:
        return perform

    def step_ends(self) -> None:
        pass

    def begin(self, header: Any) -> None:
        pass

    def operation(self, operation: Any, answer: Any) -> None:
        self._answer = operation, answer

    def close(self) -> None:
        raise OperationError("op", "an operation on a tree alone", "one for which a log has words")

    def perform(self, operation: structs.Operation) -> Any:
        """Performs one operation and returns its answer.

        Raises:
          OperationError: it is not one on a tree, or SGLang fails.
        """
        cache, self._answer = self._cache, (None, None)
        self._objects.take_all(self._allocator)
        match operation:
            case structs.MatchOp():
                self._objects.match(cache, operation, operation.tokens)
            case structs.InsertOp():
                self._objects.insert(cache, self._allocator, operation)
            case structs.LockOp():
                self._locks[operation.id] = cache.lock(self._nodes[operation.node])
            case structs.UnlockOp():
                cache.unlock(self._locks.pop(operation.id))
            case structs.ReleaseWindowOp():
                cache.release_swa(self._locks[operation.id])
            case structs.ReleaseStateOp():
                self._objects.release_state(cache, self._locks[operation.id])
            case structs.LeaveOp():
                self._objects.leave(cache, COMPONENTS[structs.KINDS.index(operation.kind)], operation.steps)
            case structs.ResetOp():
                cache.reset()
            case structs.StateOp():
                core, config = cache.tree_core, to_config(self.header)
                nodes, recent = (None, None) if self.lacks else live_tree.tree(core, config)
                return structs.State([], [], {}, nodes, recent, self._objects.ledgers(core, config))
            case structs.EndedOp():
                pass
            case _:
                raise OperationError("op", type(operation).__name__, "an operation on a tree alone")
        seen, answer = self._answer
        if isinstance(operation, structs.MatchOp | structs.InsertOp) and operation.node is not None:
            self._nodes[operation.node] = seen.node
        return answer


def python(header: structs.Header, release: str | None = None) -> InstalledSGLangEngine | InstalledTree:
    """SGLang under a header, its tree in Python: the whole cache, or the tree alone."""
    return InstalledTree(header, "python", release) if header.tree else InstalledSGLangEngine(header, release)


def rust(header: structs.Header, release: str | None = None) -> InstalledSGLangEngine | InstalledTree:
    """SGLang under a header, its tree in Rust."""
    return InstalledTree(header, "rust", release) if header.tree else RustSGLangEngine(header, release)
