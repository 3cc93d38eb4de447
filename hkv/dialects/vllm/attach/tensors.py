"""A live worker's tensors, block tables and slots, held to the plan and to the manager's rows: metadata, no bytes.

As the cache is allocated (vLLM 0.33 `allocate_kv_cache`), every layer's view is held to the strides of the plan that
the worker was given, by HKV's own layouts, and to the other layers of its group, with which it may share no byte. In
each step, what the scheduler hands over (`SchedulerOutput`) says which blocks a request has; the worker's block table,
on the host and on the device, must have these, and the slots of its tokens must lie in them, where `reference/slots.py`
puts them. Nothing in vLLM is edited: functions are replaced for as long as a session lasts.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hkv.contract.attach import Judge, Session
from hkv.errors import LayoutError
from hkv.layout.orders import B, N, Order, order_strides
from hkv.layout.strided import StridedView
from reference.slots import PAD, Geometry, slot_mapping

SUBJECT = "vllm-tensors"
"""Name of the files: what was judged, and a line for the start and for each step."""

SPANS = 1 << 17
"""Runs of all layers of a group that are compared, from the first blocks on: where strides are the planned ones, later
blocks overlap only if earlier ones do."""


@dataclasses.dataclass(frozen=True)
class LiveTensor:
    """Place and form of a tensor, in bytes; `storage` tells memory of one allocation from that of another."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str
    storage: int

    @classmethod
    def of(cls, tensor: Any) -> LiveTensor:
        """The metadata of a PyTorch tensor, which may be one without memory (`meta`)."""
        item = tensor.element_size()
        return cls(
            tuple(tensor.shape),
            tuple(stride * item for stride in tensor.stride()),
            tensor.storage_offset() * item,
            str(tensor.dtype).removeprefix("torch."),
            tensor.untyped_storage()._cdata,
        )

    def record(self) -> dict[str, Any]:
        """The same as plain values, without the storage, which is another in each run."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "storage"}


def planned_tensors(config: Any, layout: str, kernel_block_sizes: Sequence[int] | None) -> dict[str, dict[str, Any]]:
    """Shape, strides, offset and element type that the plan in a `KVCacheConfig` asks of each layer's view."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in config.kv_cache_tensors:
        number, spec = _group_of(config, tensor.layers[0])
        if not spec.has_layer_views:
            continue
        blocks = config.num_blocks_of(tensor)
        states, split = spec.num_states, 1
        if kernel_block_sizes is not None and number < len(kernel_block_sizes):
            split = spec.block_size // kernel_block_sizes[number]
        shape = (len(tensor.layers), blocks, spec.num_heads, states, spec.state_content_size_bytes)
        padded = getattr(spec, "page_size_padded", None)
        fixed = (tensor.layer_stride, tensor.block_stride, None, None, None)
        strides = order_strides(shape, Order.parse(layout), padded, fixed)
        if split > 1:  # each piece is laid out like a block of its own
            shape = (shape[0], blocks * split, shape[2], states // split, shape[4])
            pieces = (strides[0], strides[B] // split, None, None, None)
            strides = order_strides(shape, Order.parse(layout), None, pieces)
        item, dtype = _element(getattr(spec, "dtype", None))
        for index, name in enumerate(tensor.layers):
            found[name] = {
                "shape": (*shape[1 : N + 1], shape[4] // item),
                "strides": (*strides[1 : N + 1], item),
                "offset": tensor.offset + index * tensor.layer_stride,
                "dtype": dtype,
            }
    return found


def _element(dtype: Any) -> tuple[int, str]:
    return (1, "int8") if dtype is None else (dtype.itemsize, str(dtype).removeprefix("torch."))


def _group_of(config: Any, layer: str) -> tuple[int, Any]:
    """Index of a layer's group, and its spec."""
    for number, group in enumerate(config.kv_cache_groups):
        if layer in group.layer_names:
            spec = group.kv_cache_spec
            return number, getattr(spec, "kv_cache_specs", {}).get(layer, spec)
    raise KeyError(layer)


def overlap(live: Mapping[str, LiveTensor]) -> str | None:
    """Two of some tensors that share a byte, in words, looked for in `SPANS` runs of each storage's first blocks."""
    storages: dict[int, dict[str, LiveTensor]] = {}
    for name, tensor in live.items():
        storages.setdefault(tensor.storage, {})[name] = tensor
    for tensors in storages.values():
        try:
            runs = [(*run, name) for name, each in tensors.items() for run in _runs(each, SPANS // len(tensors))]
        except LayoutError as error:
            return str(error)
        end, last = 0, ""
        for start, stop, name in sorted(runs):
            if start < end:
                return f"{last} and {name} both have byte {start:,}"
            end, last = stop, name
    return None


def _runs(tensor: LiveTensor, most: int) -> list[tuple[int, int]]:
    """First byte and end of the runs of a tensor's first blocks."""
    item = tensor.strides[-1]
    blocks = max(1, min(tensor.shape[0], most // math.prod(tensor.shape[1:-1])))
    shape = (blocks, *tensor.shape[1:-1], tensor.shape[-1] * item)
    view = StridedView(shape, (*tensor.strides[:-1], 1), tensor.offset, "uint8")
    return [(start, start + size) for start, size in view.runs()]


# The worker under observation.


class Worker:
    """One process's worker: the rows that the scheduler handed over, and the tables and slots it made of them."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.rows: dict[str, list[list[int]]] = {}
        self._batch: Any = None
        self._num_blocks = (1 << 31) - 1
        self._step = 0
        self._told: dict[str, list[list[int]]] = {}

    def allocated(self, config: Any, layout: str, kernel_block_sizes: Any, views: Mapping[str, Any]) -> None:
        """Views of all layers were made."""
        self._num_blocks = config.num_blocks
        live = {name: LiveTensor.of(view) for name, view in views.items()}
        planned = planned_tensors(config, layout, kernel_block_sizes)
        groups = [list(group.layer_names) for group in config.kv_cache_groups]
        kernels = None if kernel_block_sizes is None else list(kernel_block_sizes)
        self._judge.record(
            {
                "step": 0,
                "layout": layout,
                "num_blocks": config.num_blocks,
                "groups": groups,
                "kernel_block_sizes": kernels,
                "tensors": {name: tensor.record() for name, tensor in live.items()},
            }
        )
        for name, want in planned.items():
            self._judge.judge("tensor that differs from the plan", {"layer": name}, want, live[name].record())
        for number, names in enumerate(groups):
            of_group = {name: live[name] for name in names if name in planned}
            self._judge.judge("tensors that overlap", {"group": number}, None, overlap(of_group))

    def scheduled(self, output: Any) -> None:
        """The scheduler handed over a step."""
        self._told = {}
        for id in output.finished_req_ids:
            self.rows.pop(id, None)
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = self._told[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is None:
                continue
            self._told[id] = [list(ids) for ids in new]
            if id in cached.resumed_req_ids or id not in self.rows:
                self.rows[id] = [list(ids) for ids in new]
            else:
                self.rows[id] = [[*row, *ids] for row, ids in zip(self.rows[id], new, strict=True)]

    def updated(self, batch: Any) -> None:
        """The worker took over the step into its batch."""
        self._batch = batch
        self._step += 1

    def committed(self, tables: Any, num_reqs: int) -> None:
        """The worker's block tables are on the device."""
        for index, id in self._requests(tables, num_reqs):
            for group, table in enumerate(tables.block_tables):
                want = self.rows[id][group]
                host = table.block_table.np[index, : table.num_blocks_per_row[index]].tolist()
                device = table.block_table.gpu[index, : len(want)].tolist()
                said = {"step": self._step, "request": id, "group": group}
                self._judge.judge("block table other than the manager's row", said, want, host)
                self._judge.judge("block table on the device other than the manager's row", said, want, device)

    def mapped(self, tables: Any, num_reqs: int, starts: Any, positions: Any) -> None:
        """The slots of a step's tokens are on the device."""
        starts, positions = starts.tolist(), positions.tolist()
        seen: dict[str, list[Any]] = {}
        for index, id in self._requests(tables, num_reqs):
            mine = positions[starts[index] : starts[index + 1]]
            for group, table in enumerate(tables.block_tables):
                if table.slot_mapping_mode.name != "TOKEN_TO_KV_SLOT":
                    continue
                got = table.slot_mapping.gpu[starts[index] : starts[index + 1]].tolist()
                seen.setdefault(id, []).append(_stretches(got))
                want = self._slots(table, self.rows[id][group], mine)
                strangers = {slot // table.block_size for slot in got if slot >= 0} - set(self.rows[id][group])
                call = "slots outside a request's own blocks" if strangers else "slots of a request's tokens"
                said = {"step": self._step, "request": id, "group": group, "positions": _stretches(mine)}
                self._judge.judge(call, said, _stretches(want), _stretches(got))
        if self._requests(tables, num_reqs):
            self._judge.record({"step": self._step, "new_blocks": self._told, "slots": seen})
        self._batch = None  # what comes before the next step is a dummy run, of no request

    def _requests(self, tables: Any, num_reqs: int) -> list[tuple[int, str]]:
        """Rows of the batch and their requests; none of a table that is not the batch's of this step."""
        batch = self._batch
        if batch is None or batch.block_table is not tables:
            return []
        return [(index, id) for index, id in enumerate(batch.req_ids[:num_reqs]) if id in self.rows]

    def _slots(self, table: Any, row: list[int], positions: list[int]) -> list[int]:
        """Slots of one request's tokens."""
        ranks = table.dcp_world_size
        geometry = Geometry(table.block_size, ranks, table.dcp_rank, table.cp_kv_cache_interleave_size)
        here = [0] * len(positions)
        found, _ = slot_mapping(geometry, [row], [len(row)], self._num_blocks, here, positions)
        return [PAD if block == PAD else block * table.block_size + offset for block, offset in found]


def _stretches(numbers: Sequence[int]) -> list[list[int]]:
    """Consecutive numbers as `[first, count]`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][0] + found[-1][1] and number >= 0:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


# Hooks.

RUNNER, TABLES = "vllm.v1.worker.gpu_model_runner:GPUModelRunner", "vllm.v1.worker.block_table:MultiGroupBlockTable"


def attach_tensors(session: Session) -> Callable[[], None]:
    """Has this process's workers observed, from when their first device is set up; returns what ends it.

    Before that, the modules of a worker are not imported, and most processes never do.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    judge = session.judge(SUBJECT)
    plain = WorkerWrapperBase.init_device
    begun: list[bool] = []

    @functools.wraps(plain)
    def init_device(self: Any, *arguments: Any, **named: Any) -> Any:
        made = plain(self, *arguments, **named)
        if not begun:
            begun.append(True)
            judge.hook(functools.partial(observe, steps=session.tensors == "step", refuse=session.refuse))
            if session.tensors == "step" and "vllm.v1.worker.gpu.model_runner" in sys.modules:
                session.refuse("BlockTables", "block tables of model runner V2 are on its device alone")
        return made

    WorkerWrapperBase.init_device = init_device  # type: ignore[method-assign]
    return functools.partial(setattr, WorkerWrapperBase, "init_device", plain)


def observe(
    judge: Judge, *, steps: bool = True, refuse: Callable[[str, str], None] | None = None
) -> Callable[[], None]:
    """Hooks into the functions that make tensors, and in `steps` into the model runner and its tables.

    A plan that HKV cannot follow goes to `refuse`, with the reason, and the worker goes on.
    """
    worker = Worker(judge)
    allocating = functools.partial(_allocating, worker, refuse)
    undo = [*_replaced("vllm.v1.worker.utils", "allocate_kv_cache", allocating)]
    if steps:
        undo += _method(RUNNER, "_update_states", functools.partial(_updating, worker))
        undo += _method(TABLES, "commit_block_table", functools.partial(_committing, worker))
        undo += _method(TABLES, "compute_slot_mapping", functools.partial(_mapping, worker))

    def detach() -> None:
        for each in reversed(undo):
            each()

    return detach


def _allocating(
    worker: Worker,
    refuse: Callable[[str, str], None] | None,
    plain: Any,
    kv_cache_config: Any,
    device: Any,
    layout: Any,
    kernel_block_sizes: Any = None,
) -> Any:
    views = plain(kv_cache_config, device, layout, kernel_block_sizes)
    try:
        worker.allocated(kv_cache_config, layout.name, kernel_block_sizes, views)
    except LayoutError as error:
        if refuse is None:
            raise
        refuse("allocate_kv_cache", str(error))
    return views


def _updating(worker: Worker, plain: Any, runner: Any, scheduler_output: Any) -> Any:
    worker.scheduled(scheduler_output)
    answer = plain(runner, scheduler_output)
    worker.updated(runner.input_batch)
    return answer


def _committing(worker: Worker, plain: Any, tables: Any, num_reqs: int) -> None:
    plain(tables, num_reqs)
    worker.committed(tables, num_reqs)


def _mapping(worker: Worker, plain: Any, tables: Any, num_reqs: int, query_start_loc: Any, positions: Any) -> None:
    plain(tables, num_reqs, query_start_loc, positions)
    worker.mapped(tables, num_reqs, query_start_loc, positions)


def _replaced(module: str, name: str, hook: Callable[..., Any]) -> Iterator[Callable[[], None]]:
    """Puts a hook in place of a function, also where modules imported it by name; yields what undoes it."""
    plain = getattr(importlib.import_module(module), name)

    @functools.wraps(plain)
    def hooked(*arguments: Any, **named: Any) -> Any:
        return hook(plain, *arguments, **named)

    for each in [found for key, found in list(sys.modules.items()) if key.startswith("vllm.")]:
        if vars(each).get(name) is plain:
            setattr(each, name, hooked)
            yield functools.partial(setattr, each, name, plain)


def _method(place: str, name: str, hook: Callable[..., Any]) -> Iterator[Callable[[], None]]:
    module, _, owner = place.partition(":")
    found = getattr(importlib.import_module(module), owner)
    plain = vars(found)[name]

    @functools.wraps(plain)
    def hooked(self: Any, *arguments: Any, **named: Any) -> Any:
        return hook(plain, self, *arguments, **named)

    setattr(found, name, hooked)
    yield functools.partial(setattr, found, name, plain)
