"""A layer under vLLM 0.33, besides its geometry: names, log fields, events, grouping, reservations, drawing.

`hkv.spec` says what a layer caches and what a query reads; everything that only this dialect asks stands here and in
the kinds' modules, one class for each class of spec, found by `layer` and `layer_class`. Host-only: no JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from hkv.spec import CLASSES, LayerSpec, MergeError
from hkv.spec.layer import Draw

if TYPE_CHECKING:
    from hkv.spec import RequestLimits

_LAYERS: dict[type[LayerSpec], type[VllmLayer]] = {}
"""Every class of layer by its spec's. A class enters when its module is imported."""


class VllmLayer:
    """A layer under vLLM 0.33. Subclasses are the kinds', and inherit as their specs do.

    Attributes:
      of: class of the spec.
      spec: the layer.
    """

    of: ClassVar[Any] = LayerSpec
    spec: Any

    seeks_run: ClassVar[bool] = False
    """True when a hit is searched from its end: for the last run of blocks that is long enough to resume behind."""
    registers_parts: ClassVar[bool] = False
    """True when a block may be registered before it is full."""
    stands_alone: ClassVar[bool] = False
    """True when grouping keeps each such layer in a group of its own, its page cut to the others'."""
    joins_latent: ClassVar[bool] = True
    """False when vLLM's last resort, one group for latent layers next to plain windows, is not for such layers."""
    replays: ClassVar[bool] = False
    """True when it is never cached, and what it reads of a hit is computed again instead."""
    reads_encoder: ClassVar[bool] = False
    """True when queries read an encoder's output, and no token of the request itself."""
    aligned_blocks: ClassVar[bool] = False
    """True when, next to other groups, its blocks must be as long as the alignment of hits."""
    droppable: ClassVar[bool] = True
    """False when the kind refuses the EAGLE drop."""
    log_version: ClassVar[int] = 1
    """First version of the log format that knows the kind."""
    later_log_fields: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Of `log_fields`, those that a later version of the log format added, with that version."""
    event_kind: ClassVar[str | None] = None
    """The kind's name in vLLM 0.33's KV events; None where no such event can name it."""
    draw_place: ClassVar[int] = 0
    """Rank of the kind among those that random configurations pick from, see `draw_weight`."""
    vllm_name: ClassVar[str | None] = None
    """The class of `vllm.v1.kv_cache_interface` (0.33) that describes such a layer; None for a kind of HKV's own."""
    vllm_fields: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Fields of that class to those of the kind, except geometry."""
    managed_fields: ClassVar[tuple[str, ...]] = ()
    """Fields, besides `block_size`, on which block ids depend: all that a cache manager is configured with."""
    table_alignment_tokens: ClassVar[int | None] = 128
    """Tokens to whose multiple a block table's width is rounded up, None for no rounding (vLLM 0.33)."""
    planned_weight: ClassVar[int] = 0
    """Share of the class among random layers to plan for; 0: it is not drawn."""

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _LAYERS[cls.of] = cls

    @property
    def kept_beyond(self) -> int:
        """Tokens before the first one read of the last range that stay in the cache nevertheless."""
        return 0

    def retired(self, n: int, block_size: int) -> range:
        """Columns of a row whose blocks are given back, as no query from `n` on reads them: those before the last range
        that `LayerSpec.reads` says, but for the sinks'.

        Args:
          n: position of the query, in tokens from 0.
          block_size: tokens in one block of the row.
        """
        if self.spec.one_block:
            return range(0)
        kept = -(-self.spec.sinks // block_size)
        return range(kept, max(kept, (self.spec.readable(n).start - self.kept_beyond) // block_size))

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks of states that a chunk of a prompt leaves behind inside it."""
        return 0

    @property
    def off_grid(self) -> bool:
        """True if a query's range may begin inside a block wherever a hit ends (chunks that do not start at blocks)."""
        return False

    @property
    def resumes_anywhere(self) -> bool:
        """True if a query reads no earlier token, so that every length can be resumed from."""
        return False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's hidden state, of a kind that stands alone; else 0."""
        return 0

    @property
    def checkpoint_alignment(self) -> int:
        """Tokens of which the places of such states are multiples."""
        return 1

    def spanning(self, tokens: int, page_size: int | None) -> LayerSpec:
        """With snapshots so many tokens apart, padded to a page of that size; a kind without snapshots stays as it is.

        Args:
          tokens: distance of snapshots.
          page_size: bytes that each takes up, or None for no padding.
        """
        del tokens, page_size
        return self.spec

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
        return -(-limits.max_model_len // self.spec.block_size)

    def table_width(self, limits: RequestLimits) -> int:
        """Columns of a group's block table (vLLM 0.33 `get_block_table_width`).

        As many as one request can use, rounded up so that a row covers a multiple of the kind's alignment in tokens.

        Args:
          limits: the longest request, an encoder's input included; context parallelism and Mamba mode.
        """
        columns, tokens = self.row_blocks(limits), self.table_alignment_tokens
        if tokens is None:
            return columns
        multiple = tokens // math.gcd(tokens, self.spec.block_size)
        return -(-columns // multiple) * multiple

    @classmethod
    def merge(cls, specs: Sequence[LayerSpec], bugs: frozenset[str] = frozenset()) -> LayerSpec:
        """The one spec of a group with these layers; of this kind, they must all be equal (vLLM 0.33 `merge`).

        Args:
          specs: at least one layer.
          bugs: names of upstream defects to reproduce (`hkv.dialects.vllm.bugs`).

        Raises:
          MergeError: they cannot share a group.
        """
        for spec in specs[1:]:
            if spec != specs[0]:
                raise MergeError("specs", spec, f"equal layers in one group: {specs[0]!r}")
        return specs[0]

    def is_uniform_with(self, specs: Sequence[LayerSpec]) -> bool:
        """True if all of `specs` need as many token slots as this one, so that one block table serves all."""
        return all(isinstance(spec, type(self.spec)) for spec in specs)

    def keeping(self, extra: int) -> LayerSpec:
        """The same layer, told how many tokens to keep beyond those read; a kind that keeps none stays as it is."""
        del extra
        return self.spec

    def as_full(self, block_size: int) -> LayerSpec | None:
        """The full-attention form of a local layer, with its window or chunk kept for the kernels, or None."""
        del block_size
        return None

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
        return {"kind": cls.of.kind, "block_size": size}

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
        return self.spec.with_block_size(2 * self.spec.block_size)

    @classmethod
    def smallest(cls) -> tuple[LayerSpec, ...]:
        """Layers of blocks of one and two tokens, for comparing hits in every small cache; none: it is left out."""
        return ()


def known(of: type[LayerSpec]) -> type[VllmLayer]:
    """The class of layers for a class of specs, its own or the nearest that it inherits from."""
    return next((_LAYERS[each] for each in of.__mro__ if each in _LAYERS), VllmLayer)


def classes() -> dict[str, type[VllmLayer]]:
    """Every class of layers whose module was imported, by the name of its spec's class."""
    return {name: known(of) for name, of in CLASSES.items()}
