"""Base class of a layer's cache description, and the registry of kinds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hkv.errors import SpecError
from hkv.limits import check_positive
from hkv.spec.draw import Draw

if TYPE_CHECKING:
    from hkv.spec.limits import RequestLimits

KINDS: dict[str, type[LayerSpec]] = {}
"""Every kind of layer, by its name in logs. A class enters when its module is imported."""

CLASSES: dict[str, type[LayerSpec]] = {}
"""Every class of layer, by its own name: the kinds, and those that are managed as another kind is."""


class MergeError(SpecError):
    """Layers cannot share one group because a property that a group has once differs between them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Description of one layer's cache. Frozen, hashable, validated; subclasses are the kinds, one a file.

    Attributes:
      block_size: tokens per block (vLLM 0.33 `KVCacheSpec.block_size`).
      is_draft: the layer belongs to a draft (EAGLE or MTP) module; not part of equality (vLLM 0.33).
    """

    kind: ClassVar[str] = ""
    """The kind's name in logs, e.g. `sliding_window`."""

    short_name: ClassVar[str] = ""
    """The kind's name on the command line, e.g. `swa`."""

    parameters: ClassVar[tuple[str, ...]] = ()
    """The fields that follow the block size on the command line, in order, e.g. `window` in `swa:block_size:window`."""

    log_fields: ClassVar[tuple[str, ...]] = ()
    """Fields, besides `block_size`, that a log's header gives for this kind."""

    snapshot: ClassVar[bool] = False
    """True when a block holds one state after a number of tokens, rather than a value for each token."""

    prefix_cacheable: ClassVar[bool] = True
    """False when no block of this kind can ever be reused by another request."""

    reads_all: ClassVar[bool] = False
    """True when a query reads every earlier token, so that a hit grows from the first block on."""

    one_block: ClassVar[bool] = False
    """True when a request has one block for its whole life, written over as a ring."""

    reads_encoder: ClassVar[bool] = False
    """True when queries read an encoder's output, and no token of the request itself."""

    replays: ClassVar[bool] = False
    """True when it is never cached, and what it reads of a hit is computed again instead."""

    seeks_run: ClassVar[bool] = False
    """True when a hit is searched from its end: for the last run of blocks that is long enough to resume behind."""

    retained_sparsely: ClassVar[bool] = False
    """True when a retention interval decides which of its blocks are registered."""

    registers_parts: ClassVar[bool] = False
    """True when a block may be registered before it is full."""

    slides: ClassVar[bool] = False
    """True when a query reads the last `most_read` tokens, wherever it stands, and nothing else."""

    attends: ClassVar[bool] = False
    """True for attention: a key and a value, or a latent in their place, is cached for each token."""

    single_vector: ClassVar[bool] = False
    """True where one latent a token takes the place of a key and a value."""

    stands_alone: ClassVar[bool] = False
    """True when grouping keeps each such layer in a group of its own, its page cut to the others'."""

    joins_latent: ClassVar[bool] = True
    """False when vLLM's last resort, one group for latent layers beside plain windows, is not for such layers."""

    aligned_blocks: ClassVar[bool] = False
    """True when, beside other groups, its blocks must be as long as the alignment of hits."""

    droppable: ClassVar[bool] = True
    """False when the kind refuses the EAGLE drop."""

    log_version: ClassVar[int] = 1
    """First version of the log format that knows the kind."""

    later_log_fields: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Of `log_fields`, those that a later version of the log format added, with that version."""

    log_variant: ClassVar[str] = ""
    """Field of logs, of version 3, that tells this class from another of its `kind`, which is managed alike."""

    event_kind: ClassVar[str | None] = None
    """The kind's name in vLLM 0.33's KV events; None where no such event can name it."""

    draw_place: ClassVar[int] = 0
    """Rank of the kind among those that random configurations pick from, see `draw_weight`."""

    layout_options: ClassVar[tuple[str, ...]] = ()
    """Options of `hkv layout` that describe layers of this kind and not of every one."""

    vllm_name: ClassVar[str | None] = None
    """The class of `vllm.v1.kv_cache_interface` (0.33) that describes such a layer; None for a kind of HKV's own."""

    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Fields of that class to those of the kind, except geometry."""

    managed_fields: ClassVar[tuple[str, ...]] = ()
    """Fields, besides `block_size`, on which block ids depend: all that a cache manager has to be told."""

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
    def kept_beyond(self) -> int:
        """Tokens before the first one read of the last range that stay in the cache nevertheless."""
        return 0

    def retired(self, n: int, block_size: int) -> range:
        """Columns of a row whose blocks are given back, as no query from `n` on reads them: those before the last range
        that `reads` says, but for the sinks'.

        Args:
          n: position of the query, in tokens from 0.
          block_size: tokens in one block of the row.
        """
        if self.one_block:
            return range(0)
        kept = -(-self.sinks // block_size)
        return range(kept, max(kept, (self.readable(n).start - self.kept_beyond) // block_size))

    @property
    def most_read(self) -> int:
        """Most tokens that a query reads, itself included, where that is bounded; else 0."""
        return 0

    def bounded_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens holds besides those that each token adds for good.

        Blocks are not counted whole: a window has its own tokens, and no more than the sequence; a chunk its longest.
        """
        del tokens
        return self.unpadded_page_size_bytes

    @property
    def off_grid(self) -> bool:
        """True if a query's range may begin inside a block wherever a hit ends (chunks that do not start at blocks)."""
        return False

    @property
    def resumes_anywhere(self) -> bool:
        """True if a query reads no earlier token, so that every length can be resumed from."""
        return False

    @property
    def keeps_states(self) -> bool:
        """True if a row's columns are snapshots by position, some of which other requests can resume from."""
        return False

    @property
    def latent(self) -> bool:
        """True if every query reads all earlier tokens' latents."""
        return self.reads_all and self.single_vector

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's hidden state, of a kind that stands alone; else 0."""
        return 0

    @property
    def state_tensors(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and element type of each tensor of a snapshot, in page order; empty for other kinds."""
        return ()

    @property
    def scratch_blocks(self) -> int:
        """Blocks at a row's end that hold states of drafts."""
        return 0

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks of states that a chunk of a prompt leaves behind inside it."""
        return 0

    @property
    def checkpoint_alignment(self) -> int:
        """Tokens of which the places of such states are multiples."""
        return 1

    def spanning(self, tokens: int, page_size: int | None) -> Self:
        """With snapshots so many tokens apart, padded to a page of that size; a kind without snapshots stays as it is.

        Args:
          tokens: distance of snapshots.
          page_size: bytes that each takes up, or None for no padding.
        """
        del tokens, page_size
        return self

    @property
    def element(self) -> tuple[str, str] | None:
        """Element type and packing of a token's content; None where that is not one, as of states."""
        return None

    def replicas(self, ranks: int, context_parallel: int) -> int:
        """Consecutive tensor-parallel ranks that hold the same bytes of this layer.

        Args:
          ranks: of tensor parallelism.
          context_parallel: how many of them split a sequence's tokens.
        """
        del ranks, context_parallel
        return 1

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
        """True if all of `specs` need as many token slots as this one, so that one block table serves all."""
        return all(isinstance(spec, type(self)) for spec in specs)

    def keeping(self, extra: int) -> Self:
        """The same layer, told how many tokens to keep beyond those read; a kind that keeps none stays as it is."""
        del extra
        return self

    def as_full(self, block_size: int) -> LayerSpec | None:
        """The full-attention form of a local layer; its reach stays on record, for the kernels. None: there is none."""
        del block_size
        return None

    def with_block_size(self, block_size: int) -> Self:
        """The same layer with another number of tokens per block."""
        return dataclasses.replace(self, block_size=block_size)

    def sized(self, *, page_size: int | None, **options: Any) -> Self:
        """This layer with its bytes as `hkv layout` was told them: `layout_options` by name, and the padded page."""
        raise NotImplementedError

    @classmethod
    def draw_weight(cls, feature: str, version: int) -> int:
        """Weight with which a random configuration about `feature` has the kind, relative to those of other kinds.

        0: only where the kind is asked for by name.
        """
        return 0

    @classmethod
    def draw(cls, choices: Draw, size: int, feature: str, ranks: int) -> dict[str, Any]:
        """A random layer as a log's header writes it.

        Args:
          choices: source of decisions.
          size: tokens in its block.
          feature: feature of the configuration.
          ranks: ranks of context parallelism.
        """
        return {"kind": cls.kind, "block_size": size}

    def to_text(self) -> str:
        """This layer as the command line writes it, e.g. `swa:16:1024`; geometry is left out."""
        numbers = (getattr(self, name) for name in ("block_size", *self.parameters))
        return ":".join(map(str, (self.short_name, *numbers)))

    @classmethod
    def text_form(cls) -> str:
        """Form of such a layer on the command line, e.g. `swa:block_size:window`."""
        return ":".join((cls.short_name, "block_size", *cls.parameters))

    @classmethod
    def compared_weight(cls, aligned: bool) -> int:
        """Share of the kind among random layers whose hits are compared with their definition; 0: it is not drawn.

        Args:
          aligned: all blocks are equally long, for kinds with `aligned_blocks`.
        """
        del aligned
        return 0

    @classmethod
    def draw_compared(cls, choices: Draw, size: int, ranks: int) -> LayerSpec:
        """A random layer whose hits are compared with their definition.

        Args:
          choices: source of decisions.
          size: tokens in its block.
          ranks: ranks of context parallelism.
        """
        raise NotImplementedError

    planned_weight: ClassVar[int] = 0
    """Share of the class among random layers to plan for; 0: it is not drawn."""

    @classmethod
    def draw_planned(cls, choices: Draw) -> LayerSpec:
        """A random layer to plan for, its geometry small, so that coincidences are frequent.

        Args:
          choices: source of decisions.
        """
        raise NotImplementedError

    def draw_near(self, choices: Draw) -> LayerSpec:
        """The same layer but for one thing.

        Args:
          choices: source of decisions.
        """
        del choices
        return self.with_block_size(2 * self.block_size)

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """Layers of blocks of one and two tokens, for comparing hits in every small cache; none: it is left out."""
        return ()

    def to_log(self) -> dict[str, Any]:
        """This layer as a log's header writes it."""
        fields = {name: getattr(self, name) for name in self.log_fields}
        return {"kind": self.kind, "block_size": self.block_size, **fields}
