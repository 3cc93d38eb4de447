"""Bytes of quantized linear layers and experts, in the shapes that vLLM 0.33's methods create them with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from hkv.errors import ConfigError, PlanError
from hkv.model.huggingface.common_fields import quantization_method
from hkv.model.huggingface.fields import Fields

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Layers of a checkpoint that vLLM's classes hold as one (`packed_modules_mapping`)."""


LEAST_BLOCK = 32
"""Elements on an edge of the smallest block that scales of experts are spread over."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """One linear layer on one rank, with the outputs of each of the checkpoint's layers that are held as one.

    It is split by `row` or `column` where ranks divide its inputs or outputs, by `heads` for a column whose blocks of
    scales may straddle them, else `whole`.
    """

    name: str
    inputs: int
    outputs: tuple[int, ...]
    split: str


@dataclasses.dataclass(frozen=True)
class Quantization:
    """Packing of a checkpoint's weights: none, but for subclasses, so that they are in the model's own element type."""

    def linear(self, layer: Linear, width: int) -> int:
        """Bytes of a layer without its bias; `width` is that of the model's own elements."""
        return sum(layer.outputs) * layer.inputs * width

    def experts(self, name: str, sizes: Sequence[tuple[int, int]], count: int, width: int) -> int:
        """Bytes of experts: `count` of each of some matrices of (outputs, inputs), the first gate and up as one."""
        return count * sum(rows * columns for rows, columns in sizes) * width

    def padded(self, size: int, inner: int) -> tuple[int, int]:
        """Elements of a token and inside an expert, with what a kernel wants added."""
        return size, inner


@dataclasses.dataclass(frozen=True)
class Fp8(Quantization):
    """Eight-bit floats with scales: one for each block of outputs and inputs, or each layer (`Fp8Config`).

    Activations may have a `static` scale of their own; a block's scale has 1 byte where it is a power of two. Experts
    of four bits are `packed`.
    """

    block: tuple[int, int] | None
    static: bool
    skipped: tuple[str, ...]
    ranks: int
    scale: int = 4
    packed: Mxfp4 | None = None

    def linear(self, layer: Linear, width: int) -> int:
        if is_skipped(layer.name, self.skipped):
            return super().linear(layer, width)
        rows = sum(layer.outputs)
        if self.block is None:
            return rows * layer.inputs + 4 * len(layer.outputs) * (1 + self.static)
        high, wide = self.block
        if self.ranks > 1 and layer.split == "row":
            self._divides(layer.name, (layer.inputs,), wide)
        if self.ranks > 1 and layer.split == "column":
            self._divides(layer.name, layer.outputs, high)
        elif len(layer.outputs) > 1 and layer.split != "heads":  # the last of merged layers may end inside a block
            self._divides(layer.name, layer.outputs[:-1], high)
        return rows * layer.inputs + self.scale * math.ceil(rows / high) * math.ceil(layer.inputs / wide)

    def experts(self, name: str, sizes: Sequence[tuple[int, int]], count: int, width: int) -> int:
        if self.packed is not None:
            return self.packed.experts(name, sizes, count, width)
        if is_skipped(name, self.skipped):
            return super().experts(name, sizes, count, width)
        total = count * sum(rows * columns for rows, columns in sizes)
        if self.block is None:
            return total + 4 * count * (3 + 2 * self.static)
        high, wide = self.block
        if sizes[-1][1] % high:  # scales are spread over smaller blocks (`resolve_fp8_moe_weight_block_shape`)
            high = wide = math.gcd(sizes[-1][1], high)
            self._divides(name, (sizes[-1][1],), max(high, LEAST_BLOCK))
        return total + self.scale * count * sum(
            math.ceil(rows / high) * math.ceil(columns / wide) for rows, columns in sizes
        )

    def _divides(self, name: str, sizes: Sequence[int], block: int) -> None:
        """Makes sure that blocks do not straddle ranks or layers (`validate_fp8_block_shape`)."""
        for size in sizes:
            if size % block:
                expected = f"ranks whose share of {name}, {size} elements, is a multiple of a block's {block}"
                raise PlanError("tensor_parallel_size", self.ranks, expected)


@dataclasses.dataclass(frozen=True)
class Grouped(Quantization):
    """Integers of few bits in words of 32, with a scale and a zero for each group of inputs, -1 for all (AWQ and GPTQ).

    Experts may have biases, whether the model has them or not (`AutoGPTQMoEMethod`).
    """

    bits: int
    group: int
    skipped: tuple[str, ...]
    biased: bool = False

    def linear(self, layer: Linear, width: int) -> int:
        if any(part in layer.name for part in self.skipped):
            return super().linear(layer, width)
        return self._matrix(sum(layer.outputs), layer.inputs, width)

    def experts(self, name: str, sizes: Sequence[tuple[int, int]], count: int, width: int) -> int:
        if any(part in name for part in self.skipped):
            return super().experts(name, sizes, count, width)
        bias = self.biased * sum(rows for rows, _ in sizes) * width
        return count * (sum(self._matrix(rows, columns, width) for rows, columns in sizes) + bias)

    def _matrix(self, rows: int, columns: int, width: int) -> int:
        packed, groups = 32 // self.bits, 1 if self.group == -1 else columns // self.group
        return 4 * (rows * columns // packed + groups * (rows // packed)) + groups * rows * width


@dataclasses.dataclass(frozen=True)
class Mxfp4(Quantization):
    """Experts of four-bit floats, 32 of which share a scale of eight bits; all else in the model's own type.

    Elements inside an expert on a rank are padded to a multiple, and so are those of a token (`hidden`).
    """

    multiple: int
    hidden: int

    def experts(self, name: str, sizes: Sequence[tuple[int, int]], count: int, width: int) -> int:
        elements = count * sum(rows * columns for rows, columns in sizes)
        return elements // 2 + elements // 32

    def padded(self, size: int, inner: int) -> tuple[int, int]:
        return -(-size // self.hidden) * self.hidden, -(-inner // self.multiple) * self.multiple


def is_skipped(name: str, skipped: Sequence[str]) -> bool:
    """True for a module that a checkpoint names as not quantized (`is_layer_skipped`), under the name it has there."""
    parent, _, last = name.rpartition(".")
    if name in skipped:
        return True
    if last in FUSED:
        return any(f"{parent}.{part}" in skipped for part in FUSED[last])
    return "experts" in name and any(name in each for each in skipped if "experts" in each)


def quantization_of(fields: Fields, ranks: int, capability: tuple[int, int]) -> Quantization:
    """Packing of the weights, as a config says it."""
    found = fields.outer.get("quantization_config") or fields.values.get("quantization_config")
    if not found:
        return Quantization()
    if not isinstance(found, Mapping):
        raise ConfigError("quantization_config", found, "an object")
    method = found.get("quant_method")
    skipped = tuple(found.get("modules_to_not_convert") or found.get("ignored_layers") or ())
    if method == "fp8":
        block = found.get("weight_block_size")
        small = fields.model_type == "deepseek_v4"
        return Fp8(
            tuple(block) if block else None,
            found.get("activation_scheme") == "static",
            skipped,
            ranks,
            scale=1 if small else 4,
            packed=Mxfp4(128, 128) if small else None,
        )
    if method == "mxfp4":
        return Mxfp4(64, 1) if capability[0] == 9 else Mxfp4(128, 256)
    if method in ("awq", "gptq"):
        group = found.get("group_size", found.get("q_group_size"))
        bits = found.get("bits", found.get("w_bit"))
        if bits in (4, 8) and isinstance(group, int) and not found.get("dynamic") and not found.get("lm_head"):
            return Grouped(bits, group, skipped, biased=method == "gptq")
    expected = (
        "a packing whose bytes are known: fp8, mxfp4, or awq or gptq of 4 or 8 bits; else --weights SIZE says them"
    )
    inner = found.get("quantization")
    named = inner.get("quant_algo") if isinstance(inner, Mapping) else found.get("quant_algo") or found.get("format")
    raise ConfigError("quantization_config", " ".join(filter(None, (quantization_method(found), named))), expected)
