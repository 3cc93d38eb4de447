"""What every kind of layer has in common: the base class of a layer's cache description and the registry of kinds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hkv.errors import SpecError
from hkv.limits import MAX_TOKENS, whole_number

if TYPE_CHECKING:
    from hkv.spec.limits import RequestLimits

KINDS: dict[str, type[LayerSpec]] = {}
"""Every kind of layer, by its name in logs. A class enters when its module is imported."""

CLASSES: dict[str, type[LayerSpec]] = {}
"""Every class of layer, by its own name: the kinds, and those that are managed as another kind is."""


class MergeError(SpecError):
    """Layers cannot share one group because a property that a group has once differs between them."""


def check_positive(spec: object, *names: str, most: int = MAX_TOKENS) -> None:
    """Raise SpecError unless each named attribute of `spec` is an int of at least 1 and at most `most`."""
    _check(spec, 1, most, "a positive integer", names)


def check_not_negative(spec: object, *names: str, most: int = MAX_TOKENS) -> None:
    """Raise SpecError unless each named attribute of `spec` is an int of at least 0 and at most `most`."""
    _check(spec, 0, most, "a non-negative integer", names)


def _check(spec: object, least: int, most: int, expected: str, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(spec, name)
        if type(value) is not int or not least <= value <= most:
            raise SpecError(f"{type(spec).__name__}.{name}", value, f"{expected}, at most {most}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one layer caches. Frozen, hashable, validated; subclasses are the kinds, one a file.

    Attributes:
      block_size: tokens per block (vLLM 0.33 `KVCacheSpec.block_size`).
      is_draft: the layer belongs to a draft (EAGLE or MTP) module; not part of equality (vLLM 0.33).
    """

    kind: ClassVar[str] = ""
    """The kind's name in logs, e.g. `sliding_window`."""

    short_name: ClassVar[str] = ""
    """The kind's name on the command line, e.g. `swa`."""

    parameter: ClassVar[str | None] = None
    """The field that the third part of `kind:block_size:parameter` sets on the command line, or None."""

    log_fields: ClassVar[tuple[str, ...]] = ()
    """Fields, beside `block_size`, that a log's header gives for this kind."""

    snapshot: ClassVar[bool] = False
    """True when a block holds one state after a number of tokens, rather than a value for each token."""

    prefix_cacheable: ClassVar[bool] = True
    """False when no block of this kind can ever be reused by another request."""

    uses_slot_mapping: ClassVar[bool] = True
    """False when tokens are not written to slots that the engine maps, but by the layer itself."""

    table_alignment_tokens: ClassVar[int | None] = 128
    """Tokens to whose multiple a block table's width is rounded up, None for no rounding (vLLM 0.33)."""

    block_size: int
    is_draft: bool = dataclasses.field(default=False, compare=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls
        if cls.kind:
            CLASSES[cls.__name__] = cls

    def __post_init__(self) -> None:
        check_positive(self, "block_size")

    def readable(self, n: int) -> range:
        """Token positions whose cached value the query at position `n` reads, `n` itself excluded.

        For a snapshot kind, the one position whose *following* state it reads. This is the truth that no engine's
        rule may contradict: a cache may be resumed at `n` exactly when all of `readable(n)` is there.

        Args:
          n: position of the query, in tokens from 0; `n` tokens precede it.
        """
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, padding included."""
        raise NotImplementedError

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block of one layer that carry data."""
        return self.page_size_bytes

    @property
    def num_heads(self) -> int:
        """Head slots in one page (the H axis); 1 unless the kind has heads."""
        return 1

    @property
    def num_states(self) -> int:
        """States in one block (the N axis)."""
        return self.states_in(self.block_size)

    @property
    def content_bytes(self) -> int:
        """Bytes of one (head, state) cell (the C axis)."""
        return self.unpadded_page_size_bytes // (self.num_heads * self.num_states)

    def states_in(self, tokens: int) -> int:
        """States that a block of `tokens` tokens holds: one snapshot, unless the kind says otherwise."""
        return 1

    @property
    def stride_alignment_bytes(self) -> int:
        """Bytes of which the distance between two blocks is a multiple; 1 where any distance will do."""
        return 1

    def max_request_blocks(self, limits: RequestLimits) -> int:
        """Most blocks that one request can hold at once, as vLLM 0.33 reserves them (`max_memory_usage_bytes`).

        Args:
          limits: the longest request, and how many tokens may be in flight.
        """
        raise NotImplementedError

    def held_blocks(self, start: int, end: int, limits: RequestLimits) -> int:
        """Blocks that one request holds while the tokens from `start` up to `end` are being computed.

        Args:
          start: tokens already computed and settled; what no later token reads has been given back.
          end: tokens for which blocks are allocated, `start` or more.
          limits: context parallelism and Mamba mode.
        """
        raise NotImplementedError

    def row_blocks(self, limits: RequestLimits) -> int:
        """Columns of a block table that one request can use, mostly one a block (vLLM 0.33 `max_num_blocks_per_req`).

        Args:
          limits: the longest request, context parallelism and Mamba mode.
        """
        return -(-limits.max_model_len // self.block_size)

    def table_width(self, limits: RequestLimits) -> int:
        """Columns of a group's block table (vLLM 0.33 `get_block_table_width`).

        As many as one request can use, rounded up so that a row covers a multiple of the kind's alignment in tokens.

        Args:
          limits: the longest request, an encoder's input included; context parallelism and Mamba mode.
        """
        columns, tokens = self.row_blocks(limits), self.table_alignment_tokens
        if tokens is None:
            return columns
        multiple = tokens // math.gcd(tokens, self.block_size)
        return -(-columns // multiple) * multiple

    @classmethod
    def merge(cls, specs: Sequence[LayerSpec], bugs: frozenset[str] = frozenset()) -> LayerSpec:
        """The one spec of a group with these layers; of this kind, they must all be equal (vLLM 0.33 `merge`).

        Args:
          specs: at least one layer.
          bugs: names of upstream defects to reproduce (`hkv.bugs`).

        Raises:
          MergeError: they cannot share a group.
        """
        for spec in specs[1:]:
            if spec != specs[0]:
                raise MergeError("specs", spec, f"equal layers in one group: {specs[0]!r}")
        return specs[0]

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """Whether all of `specs` need the same number of token slots as this one, so that a block table serves all."""
        return all(isinstance(spec, type(self)) for spec in specs)

    def with_block_size(self, block_size: int) -> Self:
        """The same layer with another number of tokens per block."""
        return dataclasses.replace(self, block_size=block_size)

    def to_log(self) -> dict[str, Any]:
        """This layer as a log's header writes it."""
        fields = {name: getattr(self, name) for name in self.log_fields}
        return {"kind": self.kind, "block_size": self.block_size, **fields}


def spec_from_log(fields: Mapping[str, Any]) -> LayerSpec:
    """The layer that one entry of a log header's `groups` describes.

    Args:
      fields: `kind`, `block_size` and exactly the kind's `log_fields`; a field with a default may be absent.

    Raises:
      SpecError: unknown kind, unknown or missing field, impossible value.
    """
    kind = fields.get("kind")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise SpecError("kind", kind, f"one of {', '.join(sorted(KINDS))}")
    rest = {name: value for name, value in fields.items() if name != "kind"}
    allowed = {"block_size", *cls.log_fields}
    if unknown := sorted(set(rest) - allowed):
        raise SpecError(unknown[0], rest[unknown[0]], f"a field of {kind}: {', '.join(sorted(allowed))}")
    required = {f.name for f in dataclasses.fields(cls) if f.name in allowed and f.default is dataclasses.MISSING}
    if missing := sorted(required - set(rest)):
        raise SpecError(missing[0], None, f"to be given for {kind}")
    return cls(**rest)


def spec_from_text(text: str) -> LayerSpec:
    """The layer that `kind:block_size[:parameter]` describes, as on the command line, e.g. `swa:16:1024`.

    Raises:
      SpecError: unknown kind, a part that is not a positive integer, a missing or superfluous part.
    """
    names = {cls.short_name: cls for cls in KINDS.values() if cls.short_name}
    kind, *numbers = text.split(":")
    cls = names.get(kind)
    if cls is None:
        raise SpecError("group", text, f"kind:block_size[:parameter] with a kind of {', '.join(sorted(names))}")
    wanted = ["block_size"] + ([cls.parameter] if cls.parameter else [])
    shape = ":".join([kind, *wanted])
    found = [whole_number(part) for part in numbers]
    if len(found) != len(wanted) or not all(found):
        raise SpecError("group", text, f"{shape}, each number a positive integer")
    values: dict[str, Any] = dict(zip(wanted, found, strict=True))
    return cls(**values)
