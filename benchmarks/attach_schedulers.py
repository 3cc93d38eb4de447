"""Random runs of an installed vLLM's own schedulers under observation, and what HKV says of their logs.

Each run draws groups (full attention, windows, Mamba states, MLA, mixtures), `Scheduler` or `AsyncScheduler`, drafts,
chunked prefill, priorities, the watermark, loads of a connector (in the step or while others run, a part or the whole
prompt, failing now and then), streaming sessions, aborts and resets; a model is never run, tokens are drawn. Prints how
many logs are complete, and how many agree with each engine; needs vLLM 0.33.

With `--shadow` no log is written: the engine next to each manager performs every call at once, with events on, whose
hashes are integers, vLLM's default, in every other run.

Example: python benchmarks/attach_schedulers.py --runs 500 --engines numpy,jax
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import sys
import tempfile
import traceback
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from hkv.machine import native_loops

native_loops.enable()

from hkv.dialects.vllm.attach.attach import attach  # noqa: E402
from hkv.oracle.attach.attach import AttachSettings, Session  # noqa: E402
from hkv.oracle.check import check_log  # noqa: E402
from hkv.oracle.engines import engine_factory  # noqa: E402
from hkv.oracle.log_file import find_logs, read_log  # noqa: E402

MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "ffn_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "word_embed_proj_dim": 64,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
"""A model that is described, never made."""

LENGTH = 256
"""Tokens of the longest request."""


def groups_of(draw: random.Random) -> list[Any]:
    """Specs of one to three groups of blocks of 16 tokens."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    plain: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    full = FullAttentionSpec(**plain)
    window = SlidingWindowSpec(**plain, sliding_window=draw.choice([8, 20, 48]))
    state = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    return draw.choice(
        [[full], [full], [window], [full, window], [full, state], [full, window, state], [MLAAttentionSpec(**plain)]]
    )


def scheduler(draw: random.Random, model: str, events: bool) -> Any:
    """A scheduler of drawn settings."""
    from vllm.config import (
        CacheConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.structured_output import StructuredOutputManager

    specs = groups_of(draw)
    stateful = any(isinstance(spec, MambaSpec) for spec in specs)
    asynchronous = draw.random() < 0.5
    drafts = draw.choice([0, 0, 2, 3]) if not stateful else 0
    loads = draw.choice(["", "", "sync", "async", "whole"]) if not stateful else ""
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float16", max_model_len=LENGTH, skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=draw.choice([64, 128, 256]),
            max_model_len=LENGTH,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            watermark=draw.choice([0.0, 0.0, 0.1]),
            policy=draw.choice(["fcfs", "priority"]),
        ),
        cache_config=CacheConfig(
            block_size=16, enable_prefix_caching=True, **({"mamba_cache_mode": "align"} if stateful else {})
        ),
        parallel_config=ParallelConfig(),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3)
        if drafts and not asynchronous
        else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DrawnConnector",
            kv_connector_module_path="benchmarks.drawn_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"loads": loads, "seed": draw.random()},
        )
        if loads
        else None,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
    )
    register_all_kvcache_specs(config)
    blocks = draw.choice([24, 40, 80])
    cache = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
    )
    config.cache_config.num_gpu_blocks = blocks
    made = (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=cache,
        block_size=16,
        structured_output_manager=StructuredOutputManager(config),
    )
    made.use_v2_model_runner = False
    if drafts and asynchronous:  # a draft model would have to be there for its config
        made.num_spec_tokens = made.num_lookahead_tokens = drafts
        made._spec_token_placeholders = [-1] * drafts
    return made, drafts, asynchronous


class Run:
    """One run.

    Args:
      draw: source of decisions.
      model: folder of the model's description.
      sessions: source of decisions about streaming sessions; None for none.
      events: whether the manager notes KV events.
    """

    def __init__(
        self, draw: random.Random, model: str, sessions: random.Random | None = None, events: bool = False
    ) -> None:
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256_cbor)
        self.draw, self.hasher = draw, get_request_block_hasher(16, sha256_cbor)
        self.scheduler, self.drafts, self.asynchronous = scheduler(draw, model, events)
        self.outputs: collections.deque[Any] = collections.deque()
        self.texts: list[list[int]] = []
        self.arrived = 0
        self.sessions = sessions

    def step(self) -> None:
        """One scheduling step; of an asynchronous scheduler up to two are under way."""
        draw = self.draw
        while draw.random() < 0.5 and len(self.scheduler.requests) < 8:
            self.arrive()
        if self.sessions is not None:
            self.go_on(self.sessions)
        if draw.random() < 0.04 and self.scheduler.requests:
            from vllm.v1.request import RequestStatus

            self.scheduler.finish_requests(draw.choice(list(self.scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if draw.random() < 0.02:
            loads = getattr(self.scheduler, "connector", None) is not None  # whose blocks no reset gets back
            self.scheduler.reset_prefix_cache(reset_running_requests=not loads and draw.random() < 0.5)
        self.outputs.append(self.scheduler.schedule())
        depth = draw.choice([1, 2]) if self.asynchronous else 1
        while len(self.outputs) >= depth:
            self.come_back(self.outputs.popleft())

    def arrive(self) -> None:
        """A request arrives, often with the beginning of an earlier one."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        draw = self.draw
        start = draw.choice(self.texts)[: draw.randrange(LENGTH)] if self.texts and draw.random() < 0.7 else []
        tokens = (start + [draw.randrange(500) for _ in range(draw.randrange(1, 100))])[: LENGTH - 40]
        self.texts.append(tokens)
        self.arrived += 1
        parameters = SamplingParams(max_tokens=draw.randrange(1, 30), ignore_eos=True)
        request = Request(
            f"r{self.arrived}",
            tokens,
            parameters,
            None,
            priority=draw.randrange(3),
            arrival_time=float(self.arrived),
            block_hasher=self.hasher,
            resumable=self.sessions is not None and self.sessions.random() < 0.4,
        )
        self.scheduler.add_request(request)

    def go_on(self, draw: random.Random) -> None:
        """Some streaming sessions that wait for input get it, or end."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request, RequestStatus

        for request in list(self.scheduler.requests.values()):
            if request.status != RequestStatus.WAITING_FOR_STREAMING_REQ or draw.random() < 0.5:
                continue
            tokens = [draw.randrange(500) for _ in range(draw.randrange(1, 40))]
            goes_on = request.num_tokens + len(tokens) <= LENGTH - 40 and draw.random() < 0.8
            parameters = SamplingParams(max_tokens=draw.randrange(1, 20), ignore_eos=True)
            self.scheduler.add_request(Request(request.request_id, tokens, parameters, None, resumable=goes_on))

    def come_back(self, output: Any) -> None:
        """The model's answer to a step, and a connector's."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        draw, ids = self.draw, list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for id in ids:
            request = self.scheduler.requests.get(id)
            known = len(output.scheduled_spec_decode_tokens.get(id, ()))
            done = request is not None and not self._is_chunk(output, id)
            sampled.append([draw.randrange(500) for _ in range(1 + draw.randint(0, known))] if done else [])
        connector = getattr(self.scheduler, "connector", None)
        answer = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: index for index, id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector.answer(self.scheduler) if connector is not None else None,
        )
        self.scheduler.update_from_output(output, answer)
        if self.drafts and not self.asynchronous:
            drafted = [[draw.randrange(500) for _ in range(draw.randint(0, self.drafts))] for _ in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafted))

    def _is_chunk(self, output: Any, id: str) -> bool:
        """True if the step did not reach the end of the request's prompt."""
        for new in output.scheduled_new_reqs:
            if new.req_id == id:
                return new.num_computed_tokens + output.num_scheduled_tokens[id] < len(self.text_of(id))
        cached = output.scheduled_cached_reqs
        start = cached.num_computed_tokens[cached.req_ids.index(id)]
        return start + output.num_scheduled_tokens[id] < self.scheduler.requests[id].num_prompt_tokens

    def text_of(self, id: str) -> list[int]:
        """Tokens that a request has; none if it is gone."""
        request = self.scheduler.requests.get(id)
        return [] if request is None else list(request.all_token_ids)


def record_runs(folder: pathlib.Path, runs: range, steps: int, sessions: bool = False) -> list[str]:
    """Records runs into a folder; what went wrong in those that vLLM itself did not survive."""
    session = Session(AttachSettings(folder=str(folder), states="step"))
    problems = []
    with tempfile.TemporaryDirectory() as model:
        (pathlib.Path(model) / "config.json").write_text(json.dumps(MODEL))
        for number in runs:
            session.label = f"run-{number}"
            run = Run(random.Random(number), model, random.Random(-1 - number) if sessions else None)
            attach(run.scheduler.kv_cache_manager, session, run.scheduler.vllm_config.max_in_flight_tokens)
            try:
                for _ in range(steps):
                    run.step()
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                said = " ".join(str(error).split())[:120]
                problems.append(f"run {number}: {type(error).__name__} at {place.name}:{place.lineno}: {said}")
            session.close_all()
    session.close()
    return problems


def shadow_runs(folder: pathlib.Path, runs: range, steps: int, engine: str) -> tuple[int, list[str]]:
    """Runs with an engine next to each manager: operations compared, and the differences in words."""
    session = Session(AttachSettings(folder=str(folder), mode="shadow", engine=engine))
    with tempfile.TemporaryDirectory() as model:
        (pathlib.Path(model) / "config.json").write_text(json.dumps(MODEL))
        for number in runs:
            os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = str(number % 2)
            session.label = f"run-{number}"
            run = Run(random.Random(number), model, events=True)
            attach(run.scheduler.kv_cache_manager, session, run.scheduler.vllm_config.max_in_flight_tokens)
            with contextlib.suppress(Exception):  # what vLLM itself does not survive is told of by `record_runs`
                for _ in range(steps):
                    run.step()
    compared = sum(shadow.operations for shadow in session.shadows)
    return compared, [shadow.difference.describe() for shadow in session.shadows if shadow.difference is not None]


def main() -> None:
    """Records and checks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--engines", default="numpy")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--sessions", action="store_true", help="with streaming sessions")
    parser.add_argument("--shadow", action="store_true", help="with the first engine beside, and no log")
    arguments = parser.parse_args()
    folder = arguments.folder or pathlib.Path(tempfile.mkdtemp())
    runs = range(arguments.first, arguments.first + arguments.runs)
    if arguments.shadow:
        compared, differences = shadow_runs(folder, runs, arguments.steps, arguments.engines.split(",")[0])
        print(f"{compared:,} operations compared in {len(runs)} runs, {len(differences)} differences")
        print("\n".join(differences[:5]))
        sys.exit(1 if differences else 0)
    problems = record_runs(folder, runs, arguments.steps, arguments.sessions)
    logs = [read_log(path) for path in find_logs([str(folder)])]
    ended = [log.operations[-1].reason for log in logs if type(log.operations[-1]).__name__ == "EndOp"]
    print(
        f"{len(logs)} logs, {len(logs) - len(ended)} complete, {sum(len(log.operations) for log in logs):,} operations"
    )
    for reason in [*ended, *problems]:
        print(f"  {reason}")
    wrong = 0
    for name in arguments.engines.split(","):
        found = [difference for log in logs if (difference := check_log(log, engine_factory(name))) is not None]
        print(f"{len(logs) - len(found)} of {len(logs)} agree with engine {name}")
        for difference in found[:5]:
            print(difference.describe())
        wrong += len(found)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
