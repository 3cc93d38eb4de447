"""Bytes of the parameters of vLLM 0.33's layers on one tensor-parallel rank: `ColumnParallelLinear` and its kin."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hkv.dialects.vllm.weights.quantization import Linear, Quantization
from hkv.errors import ConfigError, PlanError
from hkv.model.huggingface.fields import Fields

VOCABULARY_PADDING = 64
"""Rows of an embedding are padded to a multiple of it (`DEFAULT_VOCAB_PADDING_SIZE`), before ranks share them."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank, with what its layers are made from.

    Attributes:
      fields: of the config.
      ranks: tensor-parallel ranks.
      expert_parallel: experts are dealt out to ranks, not split.
      width: bytes of an element of the model's own type.
      quantization: of the checkpoint.
    """

    fields: Fields
    ranks: int
    expert_parallel: bool
    width: int
    quantization: Quantization

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of some fields that the file has, else the default."""
        for name in names:
            found = self.fields.values.get(name)
            if found is not None:
                if type(found) is not int or found < 0:
                    raise ConfigError(self.fields.place(name), found, "a number, on which the weights depend")
                return found
        known = self.fields.family.fields.get(names[0])
        if default is not None:
            return default
        if isinstance(known, int):
            return known
        raise ConfigError(self.fields.path + names[0], None, UNKNOWN)

    def value(self, name: str, default: Any = None) -> Any:
        """A field of the decoder, else of what is around it, else the default."""
        for values in (self.fields.values, self.fields.outer):
            if values.get(name) is not None:
                return values[name]
        return default

    def inside(self, name: str) -> Rank:
        """The same rank of a part of the config around the decoder, such as `vision_config`."""
        part = self.value(name)
        if not isinstance(part, Mapping):
            raise ConfigError(name, part, UNKNOWN)
        values = {key: value for key, value in part.items() if value is not None}
        return dataclasses.replace(self, fields=dataclasses.replace(self.fields, values=values, path=f"{name}."))

    def unknown(self, name: str, expected: str) -> ConfigError:
        """The refusal of weights that depend on a field."""
        return unknown(name, self.value(name), expected)

    @property
    def hidden(self) -> int:
        """Elements of a token between layers."""
        return self.number("hidden_size")

    def share(self, size: int, what: str) -> int:
        """An equal part of a size."""
        if size % self.ranks:
            raise PlanError("tensor_parallel_size", self.ranks, f"a divisor of the {size} {what}")
        return size // self.ranks

    def heads(self, count: int) -> int:
        """Key/value heads on a rank: an equal part, or one that several ranks hold."""
        if count % self.ranks and self.ranks % count:
            expected = f"a divisor or a multiple of the {count} key/value heads"
            raise PlanError("tensor_parallel_size", self.ranks, expected)
        return max(1, count // self.ranks)

    def vector(self, *sizes: int) -> int:
        """Norms, biases and other small parameters, in the model's element type."""
        return sum(sizes) * self.width

    def linear(self, name: str, inputs: int, outputs: tuple[int, ...], split: str = "whole", bias: bool = False) -> int:
        """A layer of which inputs and outputs are a rank's own already."""
        layer = Linear(name, inputs, outputs, split)
        return self.quantization.linear(layer, self.width) + bias * self.vector(*outputs)

    def whole(self, name: str, inputs: int, *outputs: int, bias: bool = False) -> int:
        """A layer that every rank holds (`ReplicatedLinear`)."""
        return self.linear(name, inputs, outputs, "whole", bias)

    def column(self, name: str, inputs: int, *outputs: int, bias: bool = False) -> int:
        """A layer whose outputs are dealt out (`MergedColumnParallelLinear`)."""
        mine = tuple(self.share(size, f"outputs of {name}") for size in outputs)
        return self.linear(name, inputs, mine, "column", bias)

    def row(self, name: str, inputs: int, output: int, bias: bool = False) -> int:
        """A layer whose inputs are dealt out (`RowParallelLinear`)."""
        return self.linear(name, self.share(inputs, f"inputs of {name}"), (output,), "row", bias)

    def vocabulary(self, rows: int, size: int, bias: bool = False) -> int:
        """An embedding or a head (`VocabParallelEmbedding`, `ParallelLMHead`), never quantized."""
        padded = -(-rows // VOCABULARY_PADDING) * VOCABULARY_PADDING
        return self.share(padded, "rows of the vocabulary") * (size + bias) * self.width

    def experts(self, name: str, count: int, size: int, inner: int, *, gated: bool = True, bias: bool = False) -> int:
        """Experts of one layer (`FusedMoE`)."""
        mine = -(-count // self.ranks) if self.expert_parallel else count
        part = inner if self.expert_parallel else self.share(inner, f"elements inside {name}")
        size, part = self.quantization.padded(size, part)
        sizes = (((1 + gated) * part, size), (size, part))
        return self.quantization.experts(name, sizes, mine, self.width) + bias * mine * self.vector(
            (1 + gated) * part, size
        )


def unknown(name: str, value: Any, expected: str) -> ConfigError:
    """The refusal of weights that HKV does not know."""
    return ConfigError(name, value, f"{expected}; else --weights SIZE says them")


UNKNOWN = "a value: the weights depend on it (or --weights SIZE)"
