"""Base class of a layer's cache description, and the registry of kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self, TypeVar

from hkv.errors import SpecError
from hkv.limits import MAX_RANKS, check_positive

KINDS: dict[str, type[LayerSpec]] = {}
"""Every kind of layer, by its name in logs. A class enters when its module is imported."""

CLASSES: dict[str, type[LayerSpec]] = {}
"""Every class of layer, by its own name: the kinds, and those that are managed as another kind is."""


class MergeError(SpecError):
    """Layers cannot share one group because a property that a group has once differs between them."""


@dataclasses.dataclass(frozen=True)
class Written:
    """A kind as it is written, on the command line and in a log's header (`hkv.spec.written`).

    Attributes:
      short_name: its name on the command line, e.g. `swa`; "" where it has none.
      parameters: the fields that follow the block size there, e.g. `window` in `swa:block_size:window`; logs have them.
      log_fields: further fields of logs.
      seldom: those of them that logs have only where they are not at their default.
      variant: field of logs, of version 3, that tells this class from another of its `kind`, which is managed alike.
    """

    short_name: str
    parameters: tuple[str, ...] = ()
    log_fields: tuple[str, ...] = ()
    seldom: tuple[str, ...] = ()
    variant: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields, besides `kind` and `block_size`, that a log's header may give."""
        return self.parameters + self.log_fields

    @property
    def text(self) -> str:
        """Form on the command line, e.g. `swa:block_size:window`."""
        return ":".join((self.short_name, "block_size", *self.parameters))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Description of one layer's cache. Frozen, hashable, validated; subclasses are the kinds.

    Attributes:
      block_size: tokens per block (vLLM 0.33 `KVCacheSpec.block_size`).
      is_draft: the layer belongs to a draft (EAGLE or MTP) module; not part of equality (vLLM 0.33).
    """

    kind: ClassVar[str] = ""
    """The kind's name in logs, e.g. `sliding_window`."""

    written: ClassVar[Written] = Written("")
    """Names in logs and on the command line."""

    snapshot: ClassVar[bool] = False
    """True when a block holds one state after a number of tokens, rather than a value for each token."""

    prefix_cacheable: ClassVar[bool] = True
    """False when no block of this kind can ever be reused by another request."""

    reads_all: ClassVar[bool] = False
    """True when a query reads every earlier token, so that a hit grows from the first block on."""

    one_block: ClassVar[bool] = False
    """True when a request has one block for its whole life, written over as a ring."""

    slides: ClassVar[bool] = False
    """True when a query reads the last `most_read` tokens, wherever it stands, and nothing else."""

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

    def reads(self, n: int) -> tuple[range, ...]:
        """Token positions that the query at `n` reads, as ranges in order: what `readable` says, and what lies before.

        A kind whose queries read the beginning and the end of what precedes them has two. None is empty.
        """
        found = self.readable(n)
        return (found,) if found else ()

    @property
    def sinks(self) -> int:
        """Leading tokens that every query reads, and that are therefore never given back."""
        return 0

    @property
    def encoder_tokens(self) -> int:
        """Tokens of an encoder's output that one request comes with at most, where queries read it; else 0."""
        return 0

    @property
    def most_read(self) -> int:
        """Most tokens that a query reads, itself included, where that is bounded; else 0."""
        return 0

    @property
    def keeps_states(self) -> bool:
        """True if a row's columns are snapshots by position, some of which other requests can resume from."""
        return False

    @property
    def state_tensors(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and element type of each tensor of a snapshot, in page order; empty for other kinds."""
        return ()

    @property
    def scratch_blocks(self) -> int:
        """Blocks at a row's end that hold states of drafts."""
        return 0

    @property
    def shared_by_ranks(self) -> bool:
        """True if context parallelism splits this layer's tokens over ranks."""
        return False

    def readable(self, n: int) -> range:
        """Token positions whose cached value the query at position `n` reads, `n` itself excluded.

        For a snapshot kind, the one position whose *following* state it reads. This is the truth that no engine's
        rule may contradict: a cache may be resumed at `n` exactly when all of `reads(n)` is there.

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

    def with_block_size(self, block_size: int) -> Self:
        """The same layer with another number of tokens per block."""
        return dataclasses.replace(self, block_size=block_size)


# Limits of one request: the lengths and modes that decide how many blocks it can come to hold.


MAMBA_MODES = ("align", "none")
"""`align`: states are kept at block boundaries for reuse; `none`: one running state (vLLM 0.33 `mamba_cache_mode`)."""


def retained_sparsely(spec: LayerSpec | type[LayerSpec]) -> bool:
    """True if a retention interval decides which blocks of a layer are registered: those of windows and of states."""
    return spec.slides or spec.snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The lengths that bound one request.

    Attributes:
      max_model_len: tokens of the longest request, prompt and output together.
      max_in_flight_tokens: tokens that may be scheduled but not yet settled, over the whole batch.
      max_num_encoder_input_tokens: tokens of encoders' inputs in one step; in vLLM 0.33 as many as a step has.
      context_parallel: ranks over which `cp_sharded` layers split their tokens.
      mamba_mode: one of `MAMBA_MODES`.
    """

    max_model_len: int
    max_in_flight_tokens: int = 8192
    max_num_encoder_input_tokens: int = 8192
    context_parallel: int = 1
    mamba_mode: str = "align"

    def __post_init__(self) -> None:
        check_positive(self, "max_model_len", "max_in_flight_tokens", "max_num_encoder_input_tokens")
        check_positive(self, "context_parallel", most=MAX_RANKS)
        if self.mamba_mode not in MAMBA_MODES:
            raise SpecError("mamba_mode", self.mamba_mode, f"one of {', '.join(MAMBA_MODES)}")

    def with_max_model_len(self, max_model_len: int) -> RequestLimits:
        """The same limits for another longest request."""
        return dataclasses.replace(self, max_model_len=max_model_len)


# The source of random decisions from which kinds draw layers.


T = TypeVar("T")


class Draw(Protocol):
    """A source of decisions. Small integers and early elements count as simple, for sources that can shrink."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        ...

    def chance(self, percent: int) -> bool:
        """True in about `percent` of a hundred cases."""
        ...

    def pick(self, sequence: Sequence[T]) -> T:
        """One element of a sequence that has some."""
        ...
