"""Time that observing costs a `KVCacheManager`: the same decode steps without it, recorded, and with an engine beside.

Each step allocates a token for each of 128 running requests, of 2,000 tokens each, and takes the block copies and new
block ids as vLLM's scheduler does; prompts are admitted once, and are not timed. The thread that writes runs meanwhile,
so that what it takes away from the others counts. Needs vLLM 0.33.

Example: python benchmarks/attach_overhead.py
"""

from __future__ import annotations

import gc
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
from hkv.oracle.attach.attach import AttachSettings, Session

REQUESTS, PROMPT, STEPS = 128, 2000, 200

MODEL = 5e-3
"""Seconds for which a model would run."""

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


class Engine:
    """A manager with running requests, and the clocks of its steps.

    Args:
      groups: its groups.
      mode: as `AttachSettings.mode`; "" to leave it alone.
    """

    def __init__(self, groups: list[dict[str, Any]], mode: str) -> None:
        config = to_config(header(groups))
        function, hasher = vllm_objects.hasher(config)
        vllm_objects.use_none_hash(function)
        self.manager = manager = vllm_objects.manager(config)
        manager.block_pool.enable_kv_cache_events = manager.enable_kv_cache_events = False
        self.session = Session(AttachSettings(folder=tempfile.mkdtemp(), mode=mode, states="none")) if mode else None
        if self.session is not None:
            attach(manager, self.session)
        self.requests = []
        for number in range(REQUESTS):
            request = vllm_objects.request(f"r{number}", [number, *range(PROMPT - 1)], None, hasher)
            blocks, hit, _ = manager.get_computed_blocks(request)
            manager.allocate_slots(request, PROMPT - hit, hit, blocks)
            request.num_computed_tokens = PROMPT
            vllm_objects.set_running(request)
            self.requests.append(request)
        self.times: dict[str, list[float]] = {"its thread": [], "waited": [], "all threads": []}

    def step(self) -> None:
        """One step; the model runs for a while afterwards, and the thread writes."""
        for request in self.requests:
            request.append_output_token_ids([7])
        manager = self.manager
        everything, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
        manager.new_step_starts()
        for request in self.requests:
            manager.allocate_slots(request, 1)
        manager.take_kv_cache_block_copies()
        wall, thread = time.perf_counter() - wall, time.thread_time() - thread
        time.sleep(MODEL)
        if self.session is not None:
            self.session.flush()
        everything = time.process_time() - everything
        for name, seconds in zip(self.times, (thread, wall, everything), strict=True):
            self.times[name].append(seconds * 1e3)
        for request in self.requests:
            request.num_computed_tokens += 1


def main() -> None:
    """Prints a table."""
    print(f"| groups | clock, ms a step of {REQUESTS} requests | alone | recorded | with the NumPy engine beside |")
    print("|---|---|---|---|---|")
    for name, groups in GROUPS.items():
        engines = [Engine(groups, mode) for mode in ("", "record", "shadow")]
        gc.collect()
        gc.freeze()
        for _ in range(STEPS):  # in turn: whatever else the machine does meets all alike
            for engine in engines:
                engine.step()
        for clock in engines[0].times:
            alone, recorded, shadowed = (statistics.median(engine.times[clock]) for engine in engines)
            more = f"(+{recorded / alone - 1:.0%}, {(recorded - alone) / 10:.1%} of a step of 10 ms)"
            print(f"| {name} | {clock} | {alone:.2f} | {recorded:.2f} {more} | {shadowed:.2f} |")
        for engine in engines:
            if engine.session is not None:
                engine.session.close()


if __name__ == "__main__":
    main()
