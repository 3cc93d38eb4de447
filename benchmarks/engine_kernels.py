"""The engines' own kernels over the same bytes, where installed: LMCache's block transfer, vLLM's decode write.

LMCache 0.5.6 takes CUDA tensors to its kernel and others to its form in PyTorch; vLLM's `reshape_and_cache_flash` has
CUDA alone. Both are checked against XLA before they are timed, as everything is.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hkv import paged
from hkv.chunks.formats import EngineKVFormat
from hkv.chunks.transfer import Transfer, pack, unpack
from hkv.layout.block_layout import Layout

OBJECTS = 4
POISON = 0xA5


def imported(name: str) -> Any:
    """A module that may be there; None where it, or what it is built for, is not."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def torch_for(backend: str) -> Any:
    """PyTorch, if it is installed for the device that JAX uses; else None."""
    torch = imported("torch")
    return torch if torch is not None and (backend == "cpu" or torch.cuda.is_available()) else None


def has_lmcache(found: EngineKVFormat) -> bool:
    """True if LMCache can move blocks of a format on this device."""
    if torch_for(jax.default_backend()) is None or not hasattr(imported("lmcache"), "device_ops"):
        return False
    # Its form in PyTorch takes an indexer's values and scales for rows of 132 bytes; only its kernel parts them.
    return jax.default_backend() == "gpu" or found is not EngineKVFormat.NL_X_NB_BSV_BSS


def has_vllm() -> bool:
    """True if vLLM's kernels can run on this device."""
    on_gpu = jax.default_backend() == "gpu" and torch_for("gpu") is not None
    return on_gpu and imported("vllm._C") is not None and imported("vllm._custom_ops") is not None


def repeated() -> int:
    """Times that one run does an operation: on a GPU enough that starting a program does not count."""
    return 16 if jax.default_backend() == "gpu" else 1


def where() -> str:
    """PyTorch's name of the device that JAX uses."""
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def wait(torch: Any) -> None:
    """Ends what was queued."""
    if where() == "cuda":
        torch.cuda.synchronize()


@dataclasses.dataclass
class LMCacheTransfer:
    """A pack or unpack of one kernel group by `multi_layer_block_kv_transfer`; four objects."""

    operation: str
    transfer: Transfer

    def __post_init__(self) -> None:
        self.torch, geometry = torch_for(jax.default_backend()), self.transfer.geometry
        native = importlib.import_module("lmcache.lmcache_native")
        generator = np.random.default_rng(0)
        shape = (geometry.pages_per_tensor, geometry.page_stride_bytes)
        self.tensors = [self._random(generator, shape) for _ in range(geometry.num_layers)]
        self.objects = [self._random(generator, (self.transfer.region.nbytes,)) for _ in range(OBJECTS)]
        ids = generator.permutation(geometry.num_blocks)[: OBJECTS * self.transfer.blocks_per_object]
        self.ids = self.torch.from_numpy(ids.astype(np.int64)).to(where())
        direction = native.TransferDirection.D2H if self.operation == "pack" else native.TransferDirection.H2D
        self.arguments = (
            self.torch.tensor([t.data_ptr() for t in self.tensors], dtype=self.torch.int64, device=where()),
            [o.data_ptr() for o in self.objects],
            self.ids,
            self.torch.device(where()),
            direction,
            self._shape(native),
            self.transfer.region.slots,
            native.EngineKVFormat(int(geometry.format)),
            0,
        )

    def _random(self, generator: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return self.torch.from_numpy(generator.integers(0, 256, shape, dtype=np.uint8)).to(where())

    def _shape(self, native: Any) -> Any:
        geometry, shape = self.transfer.geometry, native.PageBufferShapeDesc()
        shape.kv_size, shape.nl, shape.nb = geometry.kv_size, geometry.num_layers, geometry.num_blocks
        shape.bs, shape.nh, shape.hs = geometry.slots, geometry.num_heads, geometry.head_size
        shape.element_size, shape.dtype = geometry.item_bytes, getattr(self.torch, geometry.dtype)
        return shape

    def run(self) -> Any:
        for _ in range(repeated()):
            importlib.import_module("lmcache").device_ops.multi_layer_block_kv_transfer(*self.arguments)
        return self.objects if self.operation == "pack" else self.tensors

    def wait(self, result: Any) -> None:
        del result
        wait(self.torch)

    def verify(self) -> None:
        """Against XLA, over poison."""
        if self.operation == "pack":
            for target in self.objects:
                target.fill_(POISON)
        tensors = tuple(jnp.asarray(t.cpu().numpy()) for t in self.tensors)
        objects = jnp.asarray(np.stack([o.cpu().numpy() for o in self.objects]))
        move = pack if self.operation == "pack" else unpack
        expected, _ = move(
            self.transfer, tensors, objects, jnp.asarray(self.ids.cpu().numpy().astype(np.int32)), jnp.int32(0), "xla"
        )
        found = self.run()
        self.wait(found)
        assert all(np.array_equal(np.asarray(a), b.cpu().numpy()) for a, b in zip(expected, found, strict=True))


@dataclasses.dataclass
class VllmStep:
    """A step's tokens by vLLM's `reshape_and_cache_flash`, a launch a layer."""

    layout: Layout
    tokens: int

    def __post_init__(self) -> None:
        self.torch, layout, generator = torch_for("gpu"), self.layout, np.random.default_rng(0)
        parts = {part.name: part for part in layout.content}
        shape = (layout.num_layers, self.tokens, layout.shape[2])
        self.values = [
            self.torch.randn(*shape, *parts[name].shape, dtype=self.torch.bfloat16, device=where())
            for name in ("key", "value")
        ]
        size = parts["key"].shape[-1]
        pages = (layout.num_layers, layout.num_blocks, layout.shape[3], layout.shape[2], 2 * size)
        self.pool = self.torch.empty(pages, dtype=self.torch.bfloat16, device=where())
        self.caches = [(layer[..., :size], layer[..., size:]) for layer in self.pool]
        self.blocks = generator.permutation(layout.num_blocks)[: self.tokens]
        self.states = generator.integers(0, layout.states_per_block, self.tokens)
        slots = self.blocks * layout.states_per_block + self.states
        self.slots = self.torch.from_numpy(slots).to(where())
        self.scale = self.torch.ones((), device=where())

    def run(self) -> Any:
        write = importlib.import_module("vllm._custom_ops").reshape_and_cache_flash
        for _ in range(repeated()):
            for (keys, values), key, value in zip(self.caches, *self.values, strict=True):
                write(key, value, keys, values, self.slots, "auto", self.scale, self.scale)
        return self.pool

    def wait(self, result: Any) -> None:
        del result
        wait(self.torch)

    def verify(self) -> None:
        """Against XLA, over poison."""
        self.pool.view(self.torch.uint8).fill_(POISON)
        pool = jnp.full(self.layout.end, POISON, jnp.uint8)
        blocks, states = (jnp.asarray(ids.astype(np.int32)) for ids in (self.blocks, self.states))
        given = {
            name: jnp.asarray(value.view(self.torch.uint16).cpu().numpy()).view(jnp.bfloat16)
            for name, value in zip(("key", "value"), self.values, strict=True)
        }
        (expected,), _ = paged.write_step((pool,), (self.layout,), (blocks,), (states,), (given,))
        found = self.run()
        self.wait(found)
        assert found.view(self.torch.uint8).cpu().numpy().tobytes() == np.asarray(expected).tobytes()
