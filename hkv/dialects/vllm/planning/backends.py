"""vLLM 0.33's choice of attention kernels, looked up in a table of its own selector's answers.

`backends.json` is what `benchmarks/record_attention_backends.py` recorded of `CudaPlatformBase.get_valid_backends`:
for each compute capability, type of the cache and kind of layer the kernels that take it, best first, and of each
kernel the blocks that it takes. Block sizes, the type that is really stored and refusals follow from it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hkv.dialects.vllm.planning.engine_options import Device
from hkv.errors import ConfigError

DEFAULT_BLOCK = 16
"""Tokens of a block wherever the kernels take it (vLLM 0.33 `CacheConfig.DEFAULT_BLOCK_SIZE`)."""

FLAGS = ("sink", "images", "window", "dcp", "grouped", "cross")
"""Properties that a layer of keys and values may have, in the order in which the table names it."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An attention kernel: its blocks are multiples of one of `sizes`, its own those alone unless it takes `multiples`.

    One that `refuses` is what the selector takes and the implementation then does not.
    """

    name: str
    sizes: tuple[int, ...]
    multiples: bool
    refuses: bool

    @classmethod
    def parse(cls, text: str) -> Kernel:
        """From `NAME 16m` or `NAME 16,32,64`, with `!` for one that refuses."""
        name, _, blocks = text.removesuffix("!").partition(" ")
        sizes = tuple(int(size.removesuffix("m")) for size in blocks.split(","))
        return cls(name, sizes, blocks.endswith("m"), text.endswith("!"))

    def takes(self, block_size: int) -> bool:
        """True if a block can be cut into kernel blocks (vLLM 0.33 `supports_block_size`)."""
        return any(block_size % size == 0 for size in self.sizes)

    def largest(self, block_size: int) -> int:
        """Tokens of the largest kernel block that the block holds (vLLM 0.33 `_largest_kernel_block_within`)."""
        sizes = [max(size, block_size // size * size) if self.multiples else size for size in self.sizes]
        return max((size for size in sizes if size <= block_size), default=min(sizes))


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """A layer, as far as the selector asks about it: names out of `FLAGS`, or sizes of a latent by the table's names.

    `only` is the one kernel that the model lets the selector take, if it names one.
    """

    head_size: int
    flags: frozenset[str] = frozenset()
    latent: Mapping[str, int] | None = None
    only: str | None = None


def choose(device: Device, layer: AttentionLayer, dtype: str, block_size: int | None, implied: bool = False) -> Kernel:
    """The kernel that vLLM takes for a layer; if `implied`, the type is what `auto` means, which is no way out."""
    if (kernel := _first(device, layer, dtype, block_size)) is not None:
        return kernel
    if block_size is not None and _first(device, layer, dtype, None) is not None:
        sizes = sorted({size for kernel in kernels(device, layer, dtype) for size in kernel.sizes})
        expected = f"a multiple of {' or '.join(map(str, sizes))} on {device.name}"
        raise ConfigError("block_size", block_size, expected)
    others = [other for other in _table()["types"] if not (implied and other == "auto")]
    able = [other for other in others if _first(device, layer, other, block_size) is not None]
    sort = "keys and values" if layer.latent is None else "latents"
    if layer.latent is not None and layer.latent["sparse"]:
        sort = "latents with an indexer"
    if not able:
        raise ConfigError("device", device.name, f"another: vLLM 0.33 has no kernels there for such {sort}")
    meaning = f" (auto is {dtype} here)" if implied else ""
    raise ConfigError("kv_cache_dtype", dtype, f"one of {', '.join(able)}, for such {sort} on {device.name}{meaning}")


def _first(device: Device, layer: AttentionLayer, dtype: str, block_size: int | None) -> Kernel | None:
    able = (kernel for kernel in kernels(device, layer, dtype) if block_size is None or kernel.takes(block_size))
    kernel = next(able, None)
    return None if kernel is None or kernel.refuses else kernel


def kernels(device: Device, layer: AttentionLayer, dtype: str) -> tuple[Kernel, ...]:
    """The kernels that take a layer in whatever blocks, best first."""
    table = _table()
    if dtype not in table["types"]:
        return ()
    at, capability = table["types"].index(dtype), _capability(device)
    if layer.latent is not None:
        part = table["latents"][capability]["sparse" if layer.latent["sparse"] else "dense"]
        choice = part["rows"][_latent_key(part, layer.latent)][at]
    else:
        flags = " ".join(name for name in FLAGS if name in layer.flags)
        choice = _of_head(table["runs"][table["heads"][capability][flags][at]], layer.head_size)
    found = (Kernel.parse(table["kernels"][number]) for number in table["choices"][choice])
    return tuple(kernel for kernel in found if layer.only in (None, kernel.name))


def _latent_key(part: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """Name of the row of a latent layer; a size that no kernel asks for is 0."""
    rows = [tuple(row.split()) for row in part["rows"]]
    key = []
    for index, name in enumerate(part["sizes"]):
        listed = {row[index] for row in rows}
        key.append(str(sizes[name]) if str(sizes[name]) in listed else "0")  # 0 stands for all others
    return " ".join(key)


def _of_head(runs: str, head_size: int) -> str:
    """The choice for a size of heads, out of runs over those recorded; the last is for all that were not."""
    sizes = _table()["head_sizes"]
    each = itertools.chain.from_iterable(run[0] * int(run[1:]) for run in runs.split())
    by_size = dict(zip(sizes, each, strict=True))
    return by_size.get(head_size, by_size[sizes[-1]])


def common_block(chosen: Sequence[Kernel]) -> int:
    """Tokens of the smallest block that all kernels take, 16 where they do (vLLM 0.33).

    `Platform._preferred_block_size_for_backends`.
    """
    if all(kernel.takes(DEFAULT_BLOCK) for kernel in chosen):
        return DEFAULT_BLOCK
    candidates = sorted({math.lcm(*sizes) for sizes in itertools.product(*(kernel.sizes for kernel in chosen))})
    size = next((size for size in candidates if all(kernel.takes(size) for kernel in chosen)), None)
    if size is None:
        names = ", ".join(kernel.name for kernel in chosen)
        raise ConfigError("block_size", None, f"one that all of {names} take, and no size is")
    return size


def common_layouts(device: Device, chosen: Iterable[Kernel], dtype: str) -> tuple[str, ...] | None:
    """Orders of memory that all kernels take, or None for any (vLLM 0.33 `get_supported_kv_cache_layouts`)."""
    table = _table()["layouts"].get(_capability(device), {})
    declared = [table[kernel.name] for kernel in chosen if kernel.name in table]
    if not declared:
        return None
    common = tuple(name for name in declared[0] if all(name in other for other in declared))
    if not common:
        expected = f"another on {device.name}, whose kernels for packed layers and others lay blocks out differently"
        raise ConfigError("kv_cache_dtype", dtype, expected)
    return common


def cache_types() -> tuple[str, ...]:
    """Values of `--kv-cache-dtype` (vLLM 0.33)."""
    return tuple(_table()["types"])


def stored_type(kernel: Kernel, dtype: str) -> str:
    """The type that a latent layer stores where another was asked for (`_canonicalize_sparse_mla_kv_cache_dtype`)."""
    return _table()["stored"].get(kernel.name, {}).get(dtype, dtype)


def indexer_kernel() -> Kernel:
    """The kernel of an indexer's keys."""
    return Kernel("DEEPSEEK_V32_INDEXER", tuple(_table()["indexer"]), False, False)


def _capability(device: Device) -> str:
    """The recorded compute capability that answers for a device: the highest that is no higher."""
    recorded = [tuple(map(int, name.split("."))) for name in _table()["heads"]]
    return ".".join(map(str, max(each for each in recorded if each <= device.capability)))


@functools.cache
def _table() -> dict[str, Any]:
    text = importlib.resources.files("hkv.dialects.vllm.planning").joinpath("backends.json").read_text("utf-8")
    return json.loads(text)
