"""Makes vLLM's own scheduler with offloading from HKV's descriptions; every import of it stands in here."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib
import json
import logging
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.offload import log as structs
from hkv.dialects.vllm.offload.config import NATIVE, PAGE, SIMPLE, OffloadConfig
from hkv.errors import ConfigError

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "ffn_dim": 64,
    "max_position_embeddings": 1 << 20,
    "vocab_size": 512,
    "word_embed_proj_dim": 64,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
"""A model that is described, never made."""

CONNECTORS = {NATIVE: "OffloadingConnector", SIMPLE: "SimpleCPUOffloadConnector"}
"""vLLM's connectors, by the names in headers."""

VOCABULARY = 5
"""A request's next token is its length modulo this, as in the reference: no model runs."""

ids = vllm_objects.ids


class Sorted(set[str]):
    """Names that are gone through in order: vLLM goes through a set, whose order is the process's own."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


class Drafts:
    """`SpeculativeConfig` of an EAGLE draft, as far as a scheduler asks it: the model behind it is not described."""

    method, parallel_drafting, num_speculative_tokens_per_batch_size = "eagle", False, None
    disable_eagle_block_drop = disable_lookahead_block_hashes = False
    max_num_new_slots_for_drafting = 0

    def __init__(self, tokens: int) -> None:
        self.num_speculative_tokens = tokens

    def use_eagle(self) -> bool:
        return True

    use_eagle_block_drop = needs_eagle_block_drop = use_eagle

    def use_dspark(self) -> bool:
        return False

    use_dflash = use_multi_module_mtp = uses_draft_model = use_dspark


@functools.cache
def _model() -> str:
    """A folder with the model's description; the process leaves it to its temporary folder."""
    folder = pathlib.Path(tempfile.gettempdir(), "hkv-described-model")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


def scheduler(config: OffloadConfig) -> tuple[Any, Callable[[Any], list[bytes]]]:
    """An empty `Scheduler` with an `OffloadingConnector`, and the block hasher of its requests."""
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # a store without room is an answer, not a warning
    vllm: Any = importlib.import_module("vllm.config")
    from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.structured_output import StructuredOutputManager

    cache = config.cache
    groups = [
        KVCacheGroupSpec([f"layer{index}"], vllm_objects.spec(group.spec), is_eagle_group=index in config.eagle)
        for index, group in enumerate(cache.topology.groups)
    ]
    block_bytes = sum(group.kv_cache_spec.page_size_bytes for group in groups)
    chunk_bytes = -(-block_bytes * config.workers * config.blocks_per_chunk // PAGE) * PAGE
    token_bytes = sum(group.kv_cache_spec.page_size_bytes // group.kv_cache_spec.block_size for group in groups)
    if config.sync_tokens and not token_bytes:
        raise ConfigError("sync_tokens", config.sync_tokens, "0: states alone have no bytes a token")
    extra = {"cpu_bytes_to_use": PAGE * config.num_chunks * config.workers, "lazy_offload": config.lazy}
    native = {
        "cpu_bytes_to_use": chunk_bytes * config.num_chunks,
        "blocks_per_chunk": config.blocks_per_chunk,
        "eviction_policy": config.policy,
        "store_threshold": config.threshold,
        "max_tracker_size": config.tracked,
        "offload_prompt_only": config.prompt_only,
        "sync_load_budget_bytes": config.sync_tokens * token_bytes,
    }
    made = vllm.VllmConfig(
        device_config=vllm.DeviceConfig(device="cpu"),
        model_config=vllm.ModelConfig(
            model=_model(), dtype="float16", max_model_len=cache.max_model_len, skip_tokenizer_init=True
        ),
        scheduler_config=vllm.SchedulerConfig(
            max_num_seqs=config.most_running,
            max_num_batched_tokens=config.step_tokens,
            max_model_len=cache.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=vllm.CacheConfig(block_size=max(cache.block_sizes), enable_prefix_caching=True),
        parallel_config=vllm.ParallelConfig(),
        kv_transfer_config=vllm.KVTransferConfig(
            kv_connector=CONNECTORS[config.connector],
            kv_role="kv_both",
            kv_connector_extra_config=extra if config.connector == SIMPLE else native,
        ),
        kv_events_config=vllm.KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    made.scheduler_config.disable_hybrid_kv_cache_manager = False
    made.parallel_config.world_size = config.workers
    made.cache_config.prefix_cache_retention_interval = cache.retention_interval
    if config.aligned:
        made.cache_config.mamba_cache_mode = "align"
        made.cache_config.block_size = cache.block_size(config.aligned[0])
    made.cache_config.num_gpu_blocks = cache.num_blocks
    if cache.hash_block_size < min(cache.block_sizes):
        made.cache_config.prefix_match_unit = cache.hash_block_size
    register_all_kvcache_specs(made)
    found = KVCacheConfig(cache.num_blocks, [], groups, prefix_cache_retention_interval=cache.retention_interval)
    if config.connector == SIMPLE:
        found.kv_cache_tensors = [KVCacheTensor(PAGE * cache.num_blocks, ["layer0"], PAGE, PAGE)]
    found.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(
        found, made, cache.scheduler_block_size, cache.hash_block_size
    )
    if config.drafts:
        made.speculative_config = Drafts(config.drafts)
    scheduled = Scheduler(
        vllm_config=made,
        kv_cache_config=found,
        structured_output_manager=StructuredOutputManager(made),
        block_size=cache.scheduler_block_size,
        hash_block_size=cache.hash_block_size,
        log_stats=False,
    )
    scheduled.use_v2_model_runner = False
    hash, hasher = vllm_objects.hasher(cache)
    vllm_objects.use_none_hash(hash)
    if config.connector == SIMPLE:
        tier = scheduled.connector.scheduler_manager
        found = (tier.num_cpu_blocks, tier.block_size, tier.hash_block_size)
        assert found == (config.num_chunks, cache.scheduler_block_size, cache.hash_block_size)
    else:
        assert scheduled.connector.connector_scheduler.manager._num_chunks == config.num_chunks
    return scheduled, hasher


def request(operation: structs.RequestOp, hasher: Callable[[Any], list[bytes]]) -> Any:
    """A `Request` that has just arrived."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    made = Request(
        operation.id,
        list(operation.tokens),
        SamplingParams(max_tokens=operation.output, ignore_eos=True),
        None,
        block_hasher=hasher,
    )
    limits = {"max_load_tokens": operation.load_limit, "max_offload_tokens": operation.store_limit}
    made.kv_transfer_params = {name: limit for name, limit in limits.items() if limit is not None} or None
    return made


def abort(scheduler: Any, id: str) -> None:
    """Aborts a request."""
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)


def completed(jobs: dict[int, int]) -> Any:
    """Reports of `OffloadingConnector`'s workers on jobs: of each, how many have finished it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

    return OffloadingWorkerMetadata(completed_jobs=jobs)


def stored(events: dict[int, int]) -> Any:
    """Reports of `SimpleCPUOffloadConnector`'s workers on stores."""
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

    return SimpleCPUOffloadWorkerMetadata(completed_store_events=events)


def output(scheduler: Any, scheduled: Any, received: list[str], said: Any) -> list[str]:
    """Takes a step's output, and returns the requests that finish with it.

    Args:
      scheduler: the scheduler.
      scheduled: the step.
      received: requests whose loads have ended.
      said: what workers say of jobs.
    """
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

    names = list(scheduled.num_scheduled_tokens)
    requests = [scheduler.requests[id] for id in names]
    sampled = [
        _sampled(request, scheduled.scheduled_spec_decode_tokens.get(id, []))
        for id, request in zip(names, requests, strict=True)
    ]
    transferred = KVConnectorOutput(
        finished_recving=Sorted(received) or None,
        kv_connector_worker_meta=said,
    )
    answer = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={id: place for place, id in enumerate(names)},
        sampled_token_ids=sampled,
        kv_connector_output=transferred,
    )
    scheduler.update_from_output(scheduled, answer)
    if scheduler.num_spec_tokens:
        scheduler.update_draft_token_ids(DraftTokenIds(names, [[0] * scheduler.num_spec_tokens for _ in names]))
    return [request.request_id for request in requests if request.is_finished()]


def _sampled(request: Any, drafts: list[int]) -> list[int]:
    """Tokens that a step samples of a request: none before its last token, and one more than it accepts of drafts."""
    if request.num_computed_tokens < request.num_tokens:
        return []
    right = 0 if -1 in drafts else request.num_tokens // 2 % (len(drafts) + 1)
    return [(request.num_tokens + more) % VOCABULARY for more in range(1 + right)]
