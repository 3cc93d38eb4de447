"""Drives an installed vLLM's own `KVCacheManager`, so that HKV can be held against the engine it describes."""

from __future__ import annotations

import importlib.metadata
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hkv.dialects.vllm.config import EARLIER, NAME
from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.engines.engine import check_offloads, check_zeroing, told
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.errors import ConfigError, OperationError


class InstalledVllmEngine:
    """vLLM 0.33's `KVCacheManager` as an engine of the log format; also a `KeyedEngine`.

    What the scheduler does around the manager is done here: counting computed and in-flight tokens, remembering what a
    lookup found until the next allocation, and giving back what copies retained.

    `release` is the version that vLLM must have, whatever its rules; None for any 0.33.

    Attributes:
      evictions: cached blocks handed out to another use so far.

    Raises:
      ConfigError: vLLM is not installed, or another release of it; a configuration that it cannot represent.
    """

    def __init__(self, header: oplog.Header, release: str | None = None) -> None:
        require_vllm(release, header.dialect)
        config = to_config(header)
        self._config = config
        self._hash, self._hasher = vllm_objects.hasher(config)
        self._manager = vllm_objects.manager(config)
        self._pool = self._manager.block_pool
        self._requests: dict[str, Any] = {}
        self._running: set[str] = set()
        self._given: dict[str, list[str]] = {}
        self._found: tuple[str, Any] | None = None
        self._dropping = 0
        self.evictions = 0
        self._version = header.oplog
        self._count_evictions()

    def step(self) -> None:
        self._manager.new_step_starts()

    def request(
        self,
        id: str,
        tokens: Sequence[int],
        extra: oplog.ExtraKeys | None,
        keys: Sequence[str] | None = None,
        session: str | None = None,
        report: str = "incremental",
    ) -> None:
        self._check_new(id)
        if not tokens:
            raise OperationError("tokens", [], "at least one token")
        hasher = self._hasher
        if keys is None:
            vllm_objects.use_none_hash(self._hash)
        else:
            self._given[id] = list(keys)
            hasher = vllm_objects.given_hasher(self._given[id])
        request = self._requests[id] = vllm_objects.request(id, list(tokens), extra, hasher)
        request.session_id, request.kv_cache_report_mode = session, report

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        """A request of unnamed tokens; from the first one on the engine records no events, having no tokens to name."""
        self._check_new(id)
        self._pool.enable_kv_cache_events = False
        hasher = vllm_objects.keyed_hasher(keys, self._config)
        self._requests[id] = vllm_objects.request(id, [0] * num_tokens, None, hasher)

    def extend(self, id: str, tokens: int) -> None:
        self._known(id).append_output_token_ids([0] * tokens)

    def lookup(self, id: str, limit: int | None = None) -> oplog.Hit:
        request = self._waiting(id)
        most = self._limit(limit)
        blocks, hit, boundary = self._call("lookup", id, self._manager.get_computed_blocks, request, *most)
        self._found = (id, blocks) if hit else None
        return oplog.Hit(hit, vllm_objects.ids(blocks.blocks), boundary)

    def connector_lookup(self, id: str, limit: int | None = None) -> oplog.ConnectorHit:
        request = self._waiting(id)
        lookup, self._found = self._manager.get_computed_blocks_for_connector, None
        blocks, hit, boundary, diverged = self._call("connector_lookup", id, lookup, request, *self._limit(limit))
        hits = [hit] * len(self._config.block_sizes)
        each = getattr(self._manager.coordinator, "find_longest_cache_hit_per_group", None)
        if each is not None:
            most = request.num_tokens - 1 if limit is None else limit
            _, hits = self._call("connector_lookup", id, each, request.block_hashes, most)
        return oplog.ConnectorHit(hit, vllm_objects.ids(blocks.blocks), boundary, diverged, list(hits))

    def _limit(self, limit: int | None) -> tuple[int | None, ...]:
        if self._config.dialect != EARLIER:
            return (limit,)
        if limit is not None:
            raise OperationError("limit", limit, f"none under {EARLIER}, whose lookups take no limit")
        return ()

    def truncate(self, rows: oplog.Rows, tokens: int) -> oplog.Rows:
        truncate = self._manager.truncate_computed_blocks
        return vllm_objects.ids(self._call("truncate", tokens, truncate, self._blocks(rows), tokens).blocks)

    def _blocks(self, rows: oplog.Rows) -> Any:
        return self._manager.create_kv_cache_blocks(tuple([self._pool.blocks[each] for each in row] for row in rows))

    def allocate(self, operation: oplog.AllocateOp) -> oplog.Allocation:
        request = self._known(operation.id)
        found, self._found = self._found, None
        adopted = None if operation.rows is None else self._blocks(operation.rows)
        if operation.rows is None and operation.hit:
            if found is None or found[0] != operation.id:
                raise OperationError("hit", operation.hit, "a lookup of the same request on the line before")
            adopted = found[1]
        if operation.shared_prefix is not None:
            request.shared_prefix_boundary = operation.shared_prefix
        request.num_in_flight_tokens = operation.in_flight
        running = operation.id in self._running if operation.waiting is None else not operation.waiting
        (vllm_objects.set_running if running else vllm_objects.set_preempted)(request)
        scheduled = bool(self._running) if operation.scheduled is None else operation.scheduled
        blocks = self._call(
            "allocate",
            operation.id,
            self._manager.allocate_slots,
            request,
            operation.new,
            num_new_computed_tokens=operation.hit,
            new_computed_blocks=adopted,
            num_lookahead_tokens=operation.lookahead,
            num_external_computed_tokens=operation.external,
            delay_cache_blocks=operation.delay,
            full_sequence_must_fit=operation.must_fit,
            reserved_blocks=operation.reserved,
            has_scheduled_reqs=scheduled,
            num_encoder_tokens=operation.encoder or 0,
            skip_zeroing_group_ids=tuple(operation.loaded),
        )
        if blocks is None:
            return oplog.Allocation(None)
        vllm_objects.set_running(request)
        self._running.add(operation.id)
        return oplog.Allocation(vllm_objects.ids(blocks.blocks))

    def advance(self, id: str, tokens: int) -> None:
        self._known(id).num_computed_tokens += tokens

    def computed(self, id: str, tokens: int) -> None:
        self._known(id).num_computed_tokens = tokens

    def append(self, id: str, tokens: Sequence[int], keys: Sequence[str] = ()) -> None:
        request = self._known(id)
        if id in self._given:
            self._given[id] += keys
        else:
            vllm_objects.use_none_hash(self._hash)
        request.append_output_token_ids(list(tokens))

    def resume(self, operation: oplog.ResumeOp) -> None:
        request = self._known(operation.id)
        keys = operation.keep // self._config.hash_block_size
        if operation.id in self._given:
            self._given[operation.id][keys:] = operation.keys or []
        else:
            vllm_objects.use_none_hash(self._hash)
        vllm_objects.resume(request, operation, keys)

    def commit(self, id: str, tokens: int) -> None:
        self._call("commit", id, self._manager.cache_blocks, self._known(id), tokens)

    def retire(self, id: str, tokens: int) -> None:
        request = self._known(id)
        self._call("retire", id, self._manager.remove_skipped_blocks, id, tokens, request.num_prompt_tokens)

    def free(self, id: str) -> None:
        request = self._known(id)
        self._manager.free(request)
        self._wait(id, request)

    def pop(self, id: str) -> None:
        request = self._known(id)
        self._manager.pop_blocks_for_free(request)
        self._wait(id, request)

    def _wait(self, id: str, request: Any) -> None:
        self._running.discard(id)
        request.num_computed_tokens = 0
        request.num_in_flight_tokens = 0
        vllm_objects.set_preempted(request)

    def zeros(self) -> list[int]:
        check_zeroing(self._config)
        return self._manager.take_new_block_ids()

    def unwritten(self, id: str, tokens: int) -> None:
        check_zeroing(self._config)
        self._running_request(id)
        self._call("unwritten", id, self._manager.record_blocks_for_zeroing, id, tokens)

    def offloads(self) -> oplog.Offers:
        check_offloads(self._config)
        return self._manager.take_boundary_state_offloads()

    def finalize(self, id: str, in_flight: int) -> list[oplog.Offer]:
        check_offloads(self._config)
        request = self._running_request(id)
        request.num_in_flight_tokens = in_flight
        return self._manager.finalize_partial_tail_offloads(request)

    def release(self, blocks: Sequence[int]) -> None:
        self._pool.free_blocks(self._pool.blocks[block] for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def drop(self, id: str) -> None:
        self._waiting(id)
        del self._requests[id]
        self._given.pop(id, None)

    def evict(self, blocks: Sequence[int]) -> None:
        self._dropping += 1
        try:
            self._call("evict", blocks, self._manager.evict_blocks, set(blocks))
        finally:
            self._dropping -= 1

    def copies(self, hold: bool = False) -> list[tuple[int, int]]:
        copies, retained = self._manager.take_kv_cache_block_copies()
        if not hold:
            self._pool.free_blocks(retained)
        return [(copy.src_block_id, copy.dst_block_id) for copy in copies]

    def reset(self) -> bool:
        return self._manager.reset_prefix_cache()

    def events(self) -> list[oplog.CacheEvent]:
        return told(map(vllm_objects.event, self._manager.take_events()), self._version)

    def state(self) -> oplog.CacheState:
        state = vllm_objects.state(self._manager, self._requests)
        self._check_questions(state)
        return state

    def _check_questions(self, state: oplog.CacheState) -> None:
        """Holds what the manager says of itself to its own state: questions that a connector or a metric asks of it.

        Raises:
          OperationError: an answer that the state does not have.
        """
        manager, blocks = self._manager, self._config.num_blocks - 1
        _agree("usage", manager.usage, 1.0 - len(state.free) / blocks if blocks else 0)
        for id, row in state.rows.items():
            _agree(f"block ids of {id}", [list(ids) for ids in manager.get_block_ids(id)], row)
            computed = self._requests[id].num_computed_tokens
            told = manager.get_block_ids_for_computed_tokens(id, computed)
            for group, (ids, whole) in enumerate(zip(told, row, strict=True)):
                if self._config.topology.specs[group].reads_all:
                    covering = whole[: max(len(ids), -(-computed // self._config.block_size(group)))]
                    _agree(f"blocks of the {computed} computed tokens of {id} in group {group}", list(ids), covering)
            if self._config.caching:
                estimate = manager.estimate_cached_tokens(self._requests[id])
                _agree(f"cached tokens of {id}", estimate, self._cached_tokens(state, row))

    def _cached_tokens(self, state: oplog.CacheState, row: list[list[int]]) -> int:
        """Tokens up to which every group that is looked up has a cached block in a request's row."""
        pairs = zip(self._config.topology.specs, row, strict=True)
        entries = ([state.cached.get(str(block)) for block in ids] for spec, ids in pairs if spec.prefix_cacheable)
        return min((max((entry[1] for entry in each if entry), default=0) for each in entries), default=0)

    def num_free(self) -> int:
        return self._pool.get_num_free_blocks()

    def _check_new(self, id: str) -> None:
        if id in self._requests:
            raise OperationError("id", id, "a request that has not arrived before")

    def _running_request(self, id: str) -> Any:
        if id not in self._running:
            raise OperationError("id", id, "a running request")
        return self._requests[id]

    def _known(self, id: str) -> Any:
        try:
            return self._requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that has arrived and was not dropped") from None

    def _waiting(self, id: str) -> Any:
        request = self._known(id)
        if id in self._running:
            raise OperationError("id", id, "a waiting request")
        return request

    def _call(self, operation: str, subject: object, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except (AssertionError, IndexError, KeyError, NotImplementedError, TypeError, ValueError) as error:
            place = traceback.extract_tb(error.__traceback__)[-1].name
            said = " ".join(str(error).split()) or "no message"
            reason = f"vLLM not to raise {type(error).__name__} in {place}: {said}"
            raise OperationError(operation, subject, reason) from error

    def _count_evictions(self) -> None:
        evict = self._pool._maybe_evict_cached_block

        def counting(block: Any) -> bool:
            evicted = evict(block)
            self.evictions += evicted and not self._dropping
            return evicted

        self._pool._maybe_evict_cached_block = counting


def _agree(name: str, told: Any, due: Any) -> None:
    if told != due:
        raise OperationError(name, told, f"{due}, as vLLM's own rows, queue and index have it")


def require_vllm(release: str | None, dialect: str = NAME) -> None:
    """Makes sure that vLLM is installed, of a release, or of the dialect's where that is None; and that it keeps quiet.

    Raises:
      ConfigError: it is not.
    """
    rules = dialect.removeprefix("vllm-")
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        expected = f"vLLM {rules} to be installed; benchmarks/make_vllm_environment.py makes an environment that has it"
        raise ConfigError("engine", "vllm", expected) from None
    if release is not None and version != release:
        raise ConfigError("engine", f"vllm@{release}", f"the version that is installed, vllm@{version}")
    if release is None and not version.startswith(f"{rules}."):
        expected = f"release {rules}.x, whose rules the logs speak of; the engine vllm@{version} goes on all the same"
        raise ConfigError("vllm", version, expected)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
