"""Bytes of the parameters of vLLM 0.33's layers on one tensor-parallel rank: `ColumnParallelLinear` and its kin."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from hkv.dialects.vllm.weights.quantization import Linear, Quantization
from hkv.errors import ConfigError, PlanError
from hkv.model.huggingface.fields import Fields

Size = TypeVar("Size", int, float)

VOCABULARY_PADDING = 64
"""Rows of an embedding are padded to a multiple of it (`DEFAULT_VOCAB_PADDING_SIZE`), before ranks share them."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """One rank, with what its layers are made from; `width` is that of an element of the model's own type, in bytes."""

    fields: Fields
    ranks: int
    expert_parallel: bool
    width: int
    quantization: Quantization

    def number(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """The first of some fields that the file has, else the default."""
        for name in names:
            found = self.fields.values.get(name)
            if found is not None:
                if type(found) is not int or found < least:
                    expected = f"a number of at least {least}, on which the weights depend"
                    raise ConfigError(self.fields.place(name), found, expected)
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

    def around(self, name: str, default: Size) -> Size:
        """A number of the decoder or of what is around it, a whole one where the default is."""
        found = self.value(name, default)
        if (type(found) is not int and type(found) is not type(default)) or found < 0:
            raise ConfigError(self.fields.place(name), found, "a number, on which the weights depend")
        return type(default)(found)

    def each_layer(self, *names: str, among: Collection[Any] | None = None, count: int | None = None) -> Sequence[Any]:
        """The first of some fields that the config has: a list with an entry for each layer, of some kinds."""
        name = next((each for each in names if self.value(each) is not None), names[0])
        found, layers = self.value(name), self.fields.num_layers if count is None else count
        if found is None:
            raise ConfigError(self.fields.place(name), None, UNKNOWN)
        if not isinstance(found, list) or len(found) < layers:
            raise ConfigError(self.fields.place(name), found, f"a list with an entry for each of {layers} layers")
        for index, entry in enumerate(found):
            if isinstance(entry, list | dict) or (among is not None and entry not in among):
                expected = f"one of {', '.join(map(str, among or ()))}" if among is not None else "a name or a number"
                raise ConfigError(f"{self.fields.place(name)}[{index}]", entry, expected)
        return found

    def inside(self, name: str) -> Rank:
        """The same rank of a part of the config around the decoder, such as `vision_config`."""
        part = self.value(name)
        if not isinstance(part, Mapping):
            raise ConfigError(name, part, UNKNOWN)
        values = {key: value for key, value in part.items() if value is not None}
        return dataclasses.replace(self, fields=dataclasses.replace(self.fields, values=values, path=f"{name}."))

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
        """Routed experts without their router: whole ones dealt out to ranks, or each rank's part of every one."""
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


# Parts that many decoders are put together from: attention, MLPs, experts.


def attention(
    rank: Rank,
    name: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    norm: str = "",
    size: int | None = None,
    kv_heads: int | None = None,
    gated: bool = False,
    out: str = "o_proj",
) -> int:
    """`QKVParallelLinear`, the projection out and norms of queries and keys; sizes left out are the config's.

    Norms are over a `head`, over a `rank`'s heads, over `all` of those of all ranks, or none. Queries that are gated
    come with as many gates.
    """
    fields = rank.fields
    size = fields.head_dim.value if size is None else size
    count = rank.number("num_attention_heads")
    heads = rank.share(count, "query heads")
    given = fields.kv_heads.value if kv_heads is None else kv_heads
    shared = rank.heads(given)
    parts = ((1 + gated) * heads * size, shared * size, shared * size)
    total = rank.linear(f"{name}.qkv_proj", rank.hidden, parts, "column", bias)
    total += rank.row(f"{name}.{out}", count * size, rank.hidden, out_bias)
    sizes = {"": (), "head": (1, 1), "rank": (heads, shared), "all": (count, given)}[norm]
    return total + rank.vector(*(each * size for each in sizes))


def latent_attention(rank: Rank, name: str, *, bias: bool = False) -> int:
    """Multi-head latent attention of DeepSeek-V2 and its kin, its indexer not counted."""
    heads = rank.number("num_attention_heads")
    latent, rotary = rank.number("kv_lora_rank"), rank.number("qk_rope_head_dim")
    plain, values = rank.number("qk_nope_head_dim"), rank.number("v_head_dim")
    compressed = rank.number("q_lora_rank", default=0)
    rank.share(heads, "query heads")
    query = heads * (plain + rotary)
    if compressed:
        total = rank.whole(f"{name}.fused_qkv_a_proj", rank.hidden, compressed, latent + rotary, bias=bias)
        total += rank.vector(compressed) + rank.column(f"{name}.q_b_proj", compressed, query)
    else:
        total = rank.whole(f"{name}.kv_a_proj_with_mqa", rank.hidden, latent + rotary, bias=bias)
        total += rank.column(f"{name}.q_proj", rank.hidden, query)
    total += rank.vector(latent) + rank.column(f"{name}.kv_b_proj", latent, heads * (plain + values))
    return total + rank.row(f"{name}.o_proj", heads * values, rank.hidden, bias)


def mlp(rank: Rank, name: str, inner: int, *, size: int | None = None, gated: bool = True, bias: bool = False) -> int:
    """Gate, up and down projections, or up and down alone."""
    size = rank.hidden if size is None else size
    up = (inner, inner) if gated else (inner,)
    first = "gate_up_proj" if gated else "up_proj"
    total = rank.column(f"{name}.{first}", size, *up, bias=bias)
    return total + rank.row(f"{name}.down_proj", inner, size, bias)


def experts(
    rank: Rank,
    name: str,
    count: int,
    inner: int,
    *,
    shared: int = 0,
    correction: int = 0,
    gate_width: int | None = None,
    gate_packed: bool = False,
    shared_gate: bool = False,
    gated: bool = True,
) -> int:
    """Routed experts with their router, and shared ones.

    Args:
      rank: the rank.
      name: the module's.
      count: experts.
      inner: elements inside each.
      shared: elements inside the shared experts, 0 without any.
      correction: bytes of an element of the router's correction bias, 0 without one.
      gate_width: bytes of an element of the router; left out, the model's.
      gate_packed: the router is quantized as other layers are.
      shared_gate: the shared expert has a gate.
      gated: experts have gate and up projections.
    """
    width = rank.width if gate_width is None else gate_width
    total = rank.whole(f"{name}.gate", rank.hidden, count) if gate_packed else count * rank.hidden * width
    total += count * correction
    total += rank.experts(f"{name}.experts", count, rank.hidden, inner, gated=gated)
    if shared:
        total += mlp(rank, f"{name}.shared_experts", shared, gated=gated)
    return total + shared_gate * rank.vector(rank.hidden)
