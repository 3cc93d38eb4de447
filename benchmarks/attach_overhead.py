"""Time that observing costs a `KVCacheManager`: the same decode steps without it, recorded, and with an engine beside.

Each step allocates a token for each of 128 running requests, of 2,000 tokens each, and takes the block copies and new
block ids as vLLM's scheduler does; prompts are admitted once, and are not timed. The thread that writes runs meanwhile,
so that what it takes away from the others counts. Needs vLLM 0.33.

Example: python benchmarks/attach_overhead.py
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from hkv.dialects.vllm.attach.attach import attach
from hkv.dialects.vllm.engines import vllm_objects
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Header
from hkv.oracle.attach.session import Session
from hkv.oracle.attach.settings import AttachSettings

REQUESTS, PROMPT, STEPS = 128, 2000, 200

GROUPS = {
    "full": [{"kind": "full_attention", "block_size": 16, "cp_sharded": False}],
    "full + window": [
        {"kind": "full_attention", "block_size": 16, "cp_sharded": False},
        {"kind": "sliding_window", "block_size": 16, "window": 512},
    ],
}


def header(groups: list[dict[str, Any]]) -> Header:
    """Header of a pool that is large enough."""
    return Header(
        oplog=3,
        dialect="vllm-0.33",
        feature="attached",
        num_blocks=60_000,
        groups=groups,
        hash="sha256",
        hash_block_size=16,
        scheduler_block_size=16,
        hash_lookahead=0,
        caching=True,
        eagle=False,
        eagle_groups=[],
        prefill_lookahead=0,
        retention_interval=None,
        partial_hits=False,
        max_model_len=8192,
        max_in_flight_tokens=None,
        context_parallel=1,
    )


def step_times(groups: list[dict[str, Any]], mode: str) -> list[float]:
    """Milliseconds that the manager's calls of each step took."""
    config = to_config(header(groups))
    function, hasher = vllm_objects.hasher(config)
    vllm_objects.use_none_hash(function)
    manager = vllm_objects.manager(config)
    manager.block_pool.enable_kv_cache_events = manager.enable_kv_cache_events = False
    session = None
    if mode:
        session = Session(AttachSettings(folder=tempfile.mkdtemp(), mode=mode, states="none"))
        attach(manager, session)
    requests = []
    for number in range(REQUESTS):
        request = vllm_objects.request(f"r{number}", [number, *range(PROMPT - 1)], None, hasher)
        blocks, hit, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, PROMPT - hit, hit, blocks)
        request.num_computed_tokens = PROMPT
        vllm_objects.set_running(request)
        requests.append(request)
    times = []
    for _ in range(STEPS):
        for request in requests:
            request.append_output_token_ids([7])
        start = time.perf_counter()
        manager.new_step_starts()
        for request in requests:
            manager.allocate_slots(request, 1)
        manager.take_kv_cache_block_copies()
        times.append((time.perf_counter() - start) * 1e3)
        for request in requests:
            request.num_computed_tokens += 1
        time.sleep(0.005)  # the model runs, and the thread writes
    if session is not None:
        session.close()
    return times


def main() -> None:
    """Prints a table."""
    print(f"| groups | alone, ms a step of {REQUESTS} requests | recorded | with the NumPy engine beside |")
    print("|---|---|---|---|")
    for name, groups in GROUPS.items():
        alone, recorded, shadowed = (statistics.median(step_times(groups, mode)) for mode in ("", "record", "shadow"))
        print(
            f"| {name} | {alone:.2f} | {recorded:.2f} (+{recorded / alone - 1:.0%} of its own,"
            f" {(recorded - alone) / 10:.1%} of a step of 10 ms) | {shadowed:.2f} |"
        )


if __name__ == "__main__":
    main()
