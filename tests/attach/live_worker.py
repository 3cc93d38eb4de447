"""A worker of an installed vLLM, without a model: real scheduler, batch, tables, slots and views, some of them spoilt.

`TRITON_INTERPRET=1 python -m tests.attach.live_worker FOLDER` runs them under observation, right and with each mistake
planted, and prints what was found as JSON. vLLM computes slots in a Triton kernel, which its interpreter runs.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks import attach_schedulers
from benchmarks.installed_planning import InstalledPlanner
from hkv.dialects.vllm.attach import tensors
from hkv.dialects.vllm.planning.plan import PlanOptions
from hkv.dialects.vllm.planning.vllm import plan_vllm
from hkv.oracle.attach.attach import AttachSettings, Session
from hkv.spec import FullAttention, Mamba, RequestLimits, SlidingWindow

HEADS = {"block_size": 16, "head_size": 8, "dtype": "bfloat16"}
LAYERS = {
    "full.0": FullAttention(num_kv_heads=2, **HEADS),  # type: ignore[arg-type]
    "full.1": FullAttention(num_kv_heads=2, **HEADS),  # type: ignore[arg-type]
    "window.0": SlidingWindow(num_kv_heads=2, window=32, **HEADS),  # type: ignore[arg-type]
    "window.1": SlidingWindow(num_kv_heads=2, window=32, **HEADS),  # type: ignore[arg-type]
}
STATES = {
    "full.0": LAYERS["full.0"],
    "state": Mamba(block_size=64, shapes=((2, 3), (2, 8)), dtypes=("bfloat16", "float32"), page_size_padded=1024),
}


class Observed:
    """The worker's side of steps, under observation."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.session = Session(AttachSettings(folder=str(folder), tensors="step"))
        self.judge = self.session.judge(tensors.SUBJECT)
        self.judge.hook(tensors.observe)

    def close(self) -> dict[str, Any]:
        self.session.close()
        assert self.session.settings.folder
        return {"judged": dict(self.judge.judged), "difference": self.judge.difference}


@contextlib.contextmanager
def observed(folder: pathlib.Path, found: dict[str, Any], name: str) -> Iterator[Observed]:
    observation = Observed(folder / name.replace(" ", "-"))
    try:
        yield observation
    finally:
        found[name] = observation.close()


# Views.


def allocate(layers: dict[str, Any], order: str, change: Callable[[Any], None] = lambda config: None) -> None:
    """Allocates a planned cache, by vLLM's own function, without memory."""
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker import utils

    planner = InstalledPlanner()
    limits = RequestLimits(max_model_len=16, max_in_flight_tokens=16, max_num_encoder_input_tokens=16)
    plan = plan_vllm([layers], [1 << 20], PlanOptions(limits=limits, layout=order, num_blocks=9))
    config = KVCacheConfig(
        num_blocks=plan.num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=tensor.size,
                layers=list(tensor.layers),
                layer_stride=tensor.layer_stride,
                block_stride=tensor.block_stride,
                offset=tensor.offset,
            )
            for tensor in plan.workers[0].tensors
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(group.names), planner.spec(group.spec)) for group in plan.groups],
    )
    change(config)
    # Blocks that other layers' pages lie between are not split, as vLLM 0.33's `prepare_kernel_block_sizes` has it.
    whole = any(tensor.block_stride > tensor.layer_stride for tensor in config.kv_cache_tensors)
    sizes = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    kernels = [size if whole or size == 64 or order == "LHBNC" else 4 for size in sizes]
    utils.allocate_kv_cache(config, torch.device("meta"), KVCacheLayout[order], kernels)


def same_place(config: Any) -> None:
    """Both layers of a group at the same distance: nought."""
    config.kv_cache_tensors[0].layer_stride = config.kv_cache_tensors[0].block_stride


def transposed(plain: Any, *arguments: Any, **named: Any) -> list[Any]:
    """Views in the order of heads and tokens that is not the planned one."""
    views = plain(*arguments, **named)
    heads, tokens = views[0].shape[1], views[0].shape[2]
    size = views[0].shape[3]
    return [
        view.as_strided(view.shape, (view.stride(0), size, heads * size, 1), view.storage_offset())
        if view.stride(1) == tokens * size
        else view.as_strided(view.shape, (view.stride(0), tokens * size, size, 1), view.storage_offset())
        for view in views
    ]


# Steps.


def runner_of(groups: int) -> Any:
    """A model runner that has what `_update_states` of the real one reads, and the real batch and tables."""
    import torch
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class Runner(GPUModelRunner):
        def __init__(self) -> None:
            self.requests, self.num_prompt_logprobs, self.encoder_cache = {}, {}, {}
            self.late_interaction_runner = mock.MagicMock()
            self.speculative_config = self.kv_caches = None
            self.is_pooling_model = self.uses_mrope = self.use_async_spec_decode = self.use_async_scheduling = False
            self.device = torch.device("cpu")
            self.input_batch = InputBatch(
                max_num_reqs=16,
                max_model_len=attach_schedulers.LENGTH,
                max_num_batched_tokens=256,
                device=self.device,
                vocab_size=512,
                block_sizes=[16] * groups,
                max_num_blocks_per_req=[attach_schedulers.LENGTH // 16 + 1] * groups,
            )

        def __getattr__(self, name: str) -> Any:
            return mock.MagicMock()

    return Runner()


def work(runner: Any, output: Any) -> Any:
    """The worker's part of a step up to the model, as `_prepare_inputs` of vLLM 0.33 has it."""
    import torch

    if not output.total_num_scheduled_tokens:
        return output
    runner._update_states(output)
    batch = runner.input_batch
    counts = [output.num_scheduled_tokens[id] for id in batch.req_ids]
    batch.block_table.commit_block_table(len(counts))
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
    firsts = batch.num_computed_tokens_cpu[: len(counts)].tolist()
    positions = [first + index for first, count in zip(firsts, counts, strict=True) for index in range(count)]
    batch.block_table.compute_slot_mapping(len(counts), starts, torch.tensor(positions))
    return output


def drive(seed: int, model: str, steps: int = 12) -> None:
    """Steps of vLLM's own scheduler, each worked."""
    run = attach_schedulers.Run(random.Random(seed), model)
    runner = runner_of(len(run.scheduler.kv_cache_config.kv_cache_groups))
    schedule = run.scheduler.schedule
    last = SimpleNamespace(is_last_rank=True)
    with mock.patch("vllm.v1.worker.gpu_model_runner.get_pp_group", return_value=last):
        run.scheduler.schedule = lambda: work(runner, schedule())
        for _ in range(steps):
            run.step()


def one_block_on(plain: Any, table: Any, *arguments: Any, **named: Any) -> None:
    """Slots of the next block."""
    plain(table, *arguments, **named)
    gpu = table.slot_mapping.gpu
    gpu[gpu >= 0] += table.block_size


def next_token(plain: Any, table: Any, *arguments: Any, **named: Any) -> None:
    """Slots of the same blocks, off by one inside them."""
    plain(table, *arguments, **named)
    gpu = table.slot_mapping.gpu
    gpu[gpu >= 0] ^= 1


def one_column_late(plain: Any, table: Any, block_ids: list[int], row: int) -> None:
    """Blocks that come later are appended a column further."""
    if block_ids and table.num_blocks_per_row[row]:
        table.num_blocks_per_row[row] += 1
    plain(table, block_ids, row)


def not_copied(plain: Any, table: Any, num_reqs: int) -> None:
    """Rows that stay on the host."""


def main(folder: pathlib.Path) -> None:
    """Runs all of it."""
    found: dict[str, Any] = {}
    with observed(folder, found, "views"):
        for order in ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"):
            allocate(LAYERS, order)
        for order in ("LBNHC", "BLHNC"):
            allocate(STATES, order)
    with observed(folder, found, "tensors that overlap"):
        allocate(LAYERS, "LBNHC", same_place)
    with observed(folder, found, "other strides"):
        place = "vllm.v1.worker.utils.create_kv_cache_views"
        with mock.patch(
            place, functools.partial(transposed, sys.modules["vllm.v1.worker.utils"].create_kv_cache_views)
        ):
            allocate(LAYERS, "LBNHC")
    with tempfile.TemporaryDirectory() as model:
        (pathlib.Path(model) / "config.json").write_text(json.dumps(attach_schedulers.MODEL))
        with observed(folder, found, "steps"):
            for seed in range(12):
                drive(seed, model)
        for name, method, hook in (
            ("slots of another's block", "compute_slot_mapping", one_block_on),
            ("slots of another token", "compute_slot_mapping", next_token),
            ("a table a column off", "append_row", one_column_late),
            ("a table not copied", "commit_block_table", not_copied),
        ):
            from vllm.v1.worker.block_table import BlockTable

            plain = getattr(BlockTable, method)
            with observed(folder, found, name), mock.patch.object(BlockTable, method, _hooked(plain, hook)):
                for seed in range(4):
                    drive(seed, model)
    found["a device set up"] = set_up(folder / "device")
    print(json.dumps(found))


def set_up(folder: pathlib.Path) -> str | None:
    """The difference that a session finds which hooks in as a worker sets up its device."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    session = Session(AttachSettings(folder=str(folder)))
    with mock.patch.object(WorkerWrapperBase, "init_device"):
        undo = tensors.attach_tensors(session)
        allocate(LAYERS, "LBNHC", same_place)
        WorkerWrapperBase.init_device(object())  # type: ignore[arg-type]
        allocate(LAYERS, "LBNHC", same_place)
        undo()
    session.close()
    (report,) = folder.glob("*-vllm-tensors.json")
    return json.loads(report.read_text())["difference"]["call"]


def _hooked(plain: Any, hook: Any) -> Any:
    return lambda table, *arguments, **named: hook(plain, table, *arguments, **named)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
