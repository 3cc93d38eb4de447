"""vLLM's platform as it is on a node with eight H100, on a machine without a GPU.

`vllm.platforms.cuda` decides everything: attention backends and their block sizes, element types, defaults of the
scheduler. Only what it would ask of the driver is answered here. Groups of ranks know their size and never communicate,
so the first rank of eight is built in one process.
"""

from __future__ import annotations

import importlib
import os
import types
from typing import Any

from benchmarks.judges import stand_ins

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",  # lets vLLM take Triton as usable where no driver is active
    "HF_HUB_OFFLINE": "1",
    "VLLM_HAS_FLASHINFER_CUBIN": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}
"""Environment of a process in which vLLM is imported so."""

MEMORY = 80 << 30
"""Bytes of an H100's memory, by which vLLM chooses the tokens of a batch."""


def start() -> None:
    """Imports vLLM with the simulated platform. Once in a process, before anything else of vLLM."""
    os.environ.update(VARIABLES)
    for name in ("transformers", "xgrammar"):  # they ask at import which packages there are
        importlib.import_module(name)
    stand_ins.install()
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = _platform_class()()
    _answer_for_kernels()
    _answer_for_torch()
    _inspect_in_process()
    _answer_for_processors()
    workspace = importlib.import_module("vllm.v1.worker.workspace")
    workspace.init_workspace_manager(importlib.import_module("torch").device("meta"))


def _platform_class() -> type:
    cuda = importlib.import_module("vllm.platforms.cuda")
    interface = importlib.import_module("vllm.platforms.interface")

    class SimulatedH100(cuda.CudaPlatformBase):
        """Answers of a driver. Tensors that model classes put on the device are without content."""

        device_type = "meta"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY

        @classmethod
        def get_cuda_runtime_major(cls) -> int:
            return 13

        @classmethod
        def current_device(cls) -> str:
            return "meta"

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

    return SimulatedH100


def _answer_for_kernels() -> None:
    """Compiled operations exist by name, and the kernels that an H100 supports are supported."""
    custom = importlib.import_module("vllm._custom_ops")  # first: it declares shapes of those operations that exist
    ops = importlib.import_module("torch._ops")
    lookup = ops._OpNamespace.__getattr__

    def find(namespace: Any, name: str) -> Any:
        try:
            return lookup(namespace, name)
        except AttributeError:
            if name.startswith("__") or not namespace.name.startswith("_"):
                raise
            return stand_ins.Anything()

    ops._OpNamespace.__getattr__ = find
    for name in dir(custom):
        if "supports" in name or name.endswith("_supported"):
            setattr(custom, name, lambda *args, fp4="fp4" in name, **kwargs: not fp4)


def _answer_for_torch() -> None:
    """Streams and properties of a device that is not there; numbers read from tensors without content are 0."""
    torch = importlib.import_module("torch")
    item, tolist, cpu, whole = torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__int__

    def zeros(tensor: Any) -> Any:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")

    torch.Tensor.item = lambda tensor: 0.0 if tensor.is_meta else item(tensor)
    torch.Tensor.__int__ = lambda tensor: 0 if tensor.is_meta else whole(tensor)
    torch.Tensor.tolist = lambda tensor: tolist(zeros(tensor) if tensor.is_meta else tensor)
    torch.Tensor.cpu = lambda tensor, *values, **options: tensor if tensor.is_meta else cpu(tensor, *values, **options)
    importlib.import_module(
        "torch.utils._device"
    )._device_constructors()  # kept: it has to know the functions themselves
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _without_content(getattr(torch, name)))
    torch.accelerator.empty_cache = lambda: None
    cuda = torch.cuda
    cuda.Stream = cuda.Event = stand_ins.Anything
    cuda.current_stream = stand_ins.Anything
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        total_memory=MEMORY,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
        is_integrated=False,
    )


def _without_content(make: Any) -> Any:
    """A function of torch's that makes a tensor on the device, which then is without content."""

    def made(*values: Any, **options: Any) -> Any:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "meta"
        return make(*values, **options)

    return made


def _inspect_in_process() -> None:
    """Has model classes imported where vLLM would look at them in a child process, and keeps why one cannot be."""
    registry = importlib.import_module("vllm.model_executor.models.registry")

    def inspect(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def _answer_for_processors() -> None:
    """Models that only `transformers` has a class for see one image of few tokens: what they see at most stands in
    files of the processor, which are not part of a config and decide nothing that is cached."""
    multimodal = importlib.import_module("vllm.model_executor.models.transformers.multimodal")
    information = multimodal.MultiModalProcessingInfo
    information._get_audio_processor = lambda self: None
    information._is_audio_model = information._is_video_model = False
    information._is_image_model = True
    information.get_mm_max_tokens_per_item = lambda self, seq_len, mm_counts=None: {"image": 256}


def set_groups(tensor_parallel: int, stages: int = 1, stage: int = 0) -> None:
    """Makes this process the first of `tensor_parallel` ranks, on one of some pipeline stages."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    torch = importlib.import_module("torch")

    class SilentGroup(state.GroupCoordinator):
        """Ranks that are counted and never asked."""

        def __init__(self, name: str, size: int, rank: int = 0) -> None:
            self.unique_name = state._get_unique_name(name)
            state._register_group(self)
            self.rank = self.local_rank = self.rank_in_group = self.device_index = rank
            self.ranks, self.world_size = list(range(size)), size
            self.group_ranks = [self.ranks]
            self.cpu_group = self.device_group = types.SimpleNamespace(
                size=lambda: size, rank=lambda: 0, group_name=self.unique_name
            )
            self.device = torch.device("meta")
            self.use_device_communicator = self.use_cpu_custom_send_recv = False
            self.device_communicator = self.mq_broadcaster = None
            self.use_custom_op_call = True

        def broadcast(self, input_: Any, src: int = 0) -> Any:
            return input_

        def barrier(self) -> None:
            pass

    for name in ("WORLD", "TP", "ETP", "EP", "EPLB"):
        setattr(state, f"_{name}", SilentGroup(name.lower(), tensor_parallel))
    for name in ("DP", "DCP", "PCP"):
        setattr(state, f"_{name}", SilentGroup(name.lower(), 1))
    state._PP = SilentGroup("pp", stages, stage)
    state._NODE_COUNT = 1
