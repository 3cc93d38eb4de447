"""Makes vLLM's own objects from HKV's descriptions and reads them back; every import of vLLM stands in here."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import EARLIER, VllmConfig
from hkv.dialects.vllm.log.structs import CacheEvent, CacheState, ExtraKeys, ResumeOp
from hkv.errors import ConfigError
from hkv.keys.chained import GIVEN, SEED, no_digest

KINDS_BY_CLASS = {
    layer.vllm_name: layer.of.kind
    for layer in kinds.layer_classes().values()
    if layer.vllm_name is not None and not layer.replays and layer.of.kind in kinds.names()
}
"""Kind of group in logs, by the class of vLLM's specs; of those with bounded replay, see `REPLAYED`."""

REPLAYED = {
    layer.vllm_name: layer.of.kind
    for layer in kinds.layer_classes().values()
    if layer.replays and layer.vllm_name is not None
}
"""Kind of group in logs where vLLM's spec has `prefix_replay_tokens`, by its class."""

KEY_BYTES = 8
"""Bytes of a chain hash that logs show, from its start."""


def manager(config: VllmConfig) -> Any:
    """An empty `KVCacheManager` of that configuration, events on."""
    logging.getLogger("vllm").setLevel(logging.ERROR)  # a refused reset is an answer, not a warning
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec([group.tag], spec(group.spec), is_eagle_group=group.eagle) for group in config.topology.groups
    ]

    class Config(KVCacheConfig):
        """A cache that zeroes new blocks if asked to: vLLM derives that from layers, which are not described."""

        needs_kv_cache_zeroing = config.zeroing  # type: ignore[assignment]

    cache_config = Config(config.num_blocks, [], groups, prefix_cache_retention_interval=config.retention_interval)
    try:
        made = KVCacheManager(
            cache_config,
            max_model_len=config.max_model_len,
            scheduler_block_size=config.scheduler_block_size,
            hash_block_size=config.hash_block_size,
            max_in_flight_tokens=config.max_in_flight_tokens,
            enable_caching=config.caching,
            use_eagle=config.eagle,
            num_prefill_lookahead=config.prefill_lookahead,
            enable_kv_cache_events=True,
            dcp_world_size=config.context_parallel,
            watermark=config.watermark,
            enable_mamba_shared_prefix_checkpoint=config.shared_prefix_checkpoint,
            **({} if config.dialect == EARLIER else {"num_hash_lookahead_tokens": config.hash_lookahead}),
        )
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError("header", "this configuration", f"one that vLLM accepts: {reason}") from error
    partial = getattr(made.coordinator, "enable_partial_hash_hits", False)
    if partial != config.partial_hits:
        raise ConfigError("partial_hits", config.partial_hits, f"{partial}, as vLLM derives it from the groups")
    return made


def hasher(config: VllmConfig) -> tuple[Callable[[Any], bytes], Callable[[Any], list[bytes]]]:
    """`(hash, block_hasher)` for requests of that configuration."""
    if config.hash.startswith("xxhash") and not os.environ.get("PYTHONHASHSEED"):
        raise ConfigError("hash", config.hash, "the environment variable PYTHONHASHSEED to be set: its seed is random")
    if config.hash == GIVEN:
        return no_digest, given_hasher([])
    if config.hash_seed != os.environ.get("PYTHONHASHSEED", SEED):
        raise ConfigError("hash_seed", config.hash_seed, "the environment variable PYTHONHASHSEED to be set to it")
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    function = get_hash_fn_by_name(config.hash)
    ahead = () if config.dialect == EARLIER else (config.hash_lookahead,)
    return function, get_request_block_hasher(config.hash_block_size, function, *ahead)


def keyed_hasher(keys: Sequence[int], config: VllmConfig) -> Callable[[Any], list[bytes]]:
    """A block hasher that hands out keys known beforehand as 32-byte chain hashes."""
    size, ahead = config.hash_block_size, config.hash_lookahead

    def hashes(request: Any) -> list[bytes]:
        done = len(request.block_hashes)
        end = min(max(0, request.num_tokens - ahead) // size, len(keys))
        return [keys[i].to_bytes(32, "big") for i in range(done, end)]

    return hashes


def given_hasher(keys: list[str]) -> Callable[[Any], list[bytes]]:
    """A block hasher that hands out the keys, in hex, that a list has beyond those of the request."""

    def hashes(request: Any) -> list[bytes]:
        return [bytes.fromhex(key) for key in keys[len(request.block_hashes) :]]

    return hashes


def use_none_hash(function: Callable[[Any], bytes]) -> None:
    """Sets the hash of the empty prefix, a global of vLLM, to this hash function's; to be called before it hashes."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(function)


def request(id: str, tokens: list[int], extra: ExtraKeys | None, block_hasher: Callable[[Any], list[bytes]]) -> Any:
    """A `Request` that has just arrived."""
    from vllm.v1.request import Request

    named = {} if extra is None else _identity(extra)
    return Request(id, tokens, _sampling_params(), None, block_hasher=block_hasher, **named)


def resume(request: Any, operation: ResumeOp, keys: int) -> None:
    """Does to a request what vLLM 0.33 `Scheduler._update_request_as_session` does; `keys`: hashes that stay."""
    del request._all_token_ids[operation.keep :]
    del request.block_hashes[keys:]
    if operation.extra is not None:
        request.mm_features = _identity(operation.extra).get("mm_features", [])
    request._all_token_ids.extend(operation.tokens)
    request._output_token_ids[:] = request._all_token_ids[operation.prompt :]
    request.prompt_token_ids = request._all_token_ids[: operation.prompt]
    request.num_prompt_tokens = operation.prompt
    request.update_block_hashes()


def set_running(request: Any) -> None:
    """Marks a request as running."""
    request.status = _statuses().RUNNING


def set_preempted(request: Any) -> None:
    """Marks a request as waiting again."""
    request.status = _statuses().PREEMPTED


def event(event: Any) -> CacheEvent:
    """A KV event as the latest version of logs writes it."""
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

    match event:
        case BlockStored():
            keys, parent = _keys(event.block_hashes), event.parent_block_hash
            named = keys is not None and not isinstance(parent, int)
            extra = [
                None if each is None else [key.hex() if isinstance(key, bytes) else key for key in each]
                for each in event.extra_keys or ()
            ]
            return CacheEvent(
                type="stored",
                group=event.group_idx,
                num_blocks=len(event.block_hashes),
                block_size=event.block_size,
                tokens=list(event.token_ids),
                keys=keys,
                parent=None if not named else "" if parent is None else bytes(parent[:KEY_BYTES]).hex(),  # type: ignore[index]
                medium=event.medium,
                lora_name=event.lora_name or "",
                extra_keys=extra,
                spec_kind=event.kv_cache_spec_kind,
                window=event.kv_cache_spec_sliding_window or 0,
                session=event.session_id or "",
                lookahead=[list(tokens) for tokens in getattr(event, "lookahead_token_ids", None) or ()],
            )
        case BlockRemoved():
            keys, count = _keys(event.block_hashes), len(event.block_hashes)
            return CacheEvent(type="removed", group=event.group_idx, num_blocks=count, keys=keys, medium=event.medium)
        case AllBlocksCleared():
            return CacheEvent(type="cleared")
        case _:
            raise ConfigError("event", type(event).__name__, "BlockStored, BlockRemoved or AllBlocksCleared")


def state(manager: Any, requests: Iterable[str]) -> CacheState:
    """The state of a `KVCacheManager`; rows stand under the ids of these requests, which are vLLM's own."""
    pool = manager.block_pool
    # The null block is asked for a key too: it never has one, unless somebody registers a skipped column.
    rows = {id: ids(manager.coordinator.get_blocks(id)) for id in requests}
    return CacheState(
        free=[block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        refs={str(block.block_id): block.ref_cnt for block in pool.blocks if block.ref_cnt and not block.is_null},
        rows={id: row for id, row in rows.items() if any(row)},
        cached={str(block.block_id): cached_entry(block) for block in pool.blocks if block.block_hash is not None},
    )


def ids(groups: Iterable[Iterable[Any]]) -> list[list[int]]:
    """Block ids per group."""
    return [[block.block_id for block in group] for group in groups]


def cached_entry(block: Any) -> tuple[int, int, str]:
    """`(group, tokens covered, first bytes of the chain hash)` of a block's primary key."""
    group = int.from_bytes(block.block_hash[-4:], "big")
    return group, block.block_hash_num_tokens, block.block_hash[:KEY_BYTES].hex()


def _keys(hashes: Sequence[bytes | int]) -> list[str] | None:
    """The keys as logs write them; None where events have the last bytes only, as integers."""
    named = [bytes(value[:KEY_BYTES]).hex() for value in hashes if not isinstance(value, int)]
    return named if len(named) == len(hashes) else None


def spec(spec: Any) -> Any:
    """A group's spec as vLLM has it; its layers have one head of one number."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    layer = kinds.layer(spec)
    cls = getattr(vllm, layer.vllm_name or "", None)
    if cls is None:
        raise ConfigError("kind", spec.kind, "a kind that vLLM has")
    named = {theirs: getattr(spec, ours) for theirs, ours in layer.vllm_fields.items() if ours in layer.managed_fields}
    if spec.snapshot:
        state = {"shapes": ((1,),), "dtypes": (torch.float32,), "mamba_cache_mode": spec.cache_mode}
        return cls(block_size=spec.block_size, **state, **named)
    heads = {"block_size": spec.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.bfloat16}
    return cls(**heads, dcp_sharded=spec.shared_by_ranks, **named)


def _identity(extra: ExtraKeys) -> dict[str, Any]:
    named: dict[str, Any] = {"cache_salt": extra.salt}
    if extra.lora is not None:
        from vllm.lora.request import LoRARequest

        name, path = extra.lora
        named["lora_request"] = LoRARequest(lora_name=name, lora_int_id=1, lora_path=path)
    if extra.multimodal:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        named["mm_features"] = [
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=offset, length=length)
            )
            for name, offset, length in extra.multimodal
        ]
    if extra.embeds is not None:
        import torch

        named["prompt_embeds"] = torch.tensor([list(bytes.fromhex(text)) for text in extra.embeds], dtype=torch.uint8)
    return named


@functools.cache
def _sampling_params() -> Any:
    from vllm.sampling_params import SamplingParams

    return SamplingParams(max_tokens=1)


@functools.cache
def _statuses() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus
