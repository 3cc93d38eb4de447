"""Cases: one call of a kernel as a value, which is drawn, made smaller, kept in a file and repeated.

Sizes are drawn small and unequal, and now and then made to coincide: two heads and two blocks, as many slots as heads,
since units that are confused agree where sizes do. `FEATURES` names what not every kernel supports; a kernel says what
it lacks (`Supports`), and what is left out is counted by these names, never silently.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from types import MappingProxyType

import msgspec

from hkv.chunks.formats import TRAITS, EngineKVFormat
from hkv.errors import ConfigError
from hkv.testing.kernels.placement import CONTENTS, FAMILIES, SCALED, Placement, place

OPERATIONS = ("write", "gather", "scatter", "copy_blocks", "zero", "pack", "unpack", "attention")
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
CHUNKED = ("pack", "unpack")
MOVING = frozenset({"write", "scatter", "gather", "copy_blocks", "zero"})
INTEGERS = ("int8", "uint8")
ONE_BYTE_FLOATS = ("float8_e4m3fn", "float8_e5m2")

FEATURES = MappingProxyType(
    {
        "padding tokens": "-1 among slots or block ids, which moves nothing",
        "null block": "the null block in a table: reads as zeros, is never written",
        "missing ids": "ids beyond the pool, or below -1, which move nothing; asked only of kernels that say so",
        "split blocks": "several kernel blocks make up a block of the table",
        "padded pages": "bytes after each page that belong to nobody",
        "offset": "a tensor that does not begin where its memory does",
        "strided inputs": "rows of new keys and values apart, as slices of one projection are",
        "two sizes": "values of another size than keys",
        "tensor scales": "wider numbers that the kernel divides by one scale and rounds",
        "own scales": "wider numbers for which the kernel makes a scale for each token and head",
        "far blocks": "blocks behind more than 2^31 elements of a pool",
        "overlapping copies": "blocks that are a source and a target",
        "repeated ids": "ids twice in a list of blocks to zero",
        "NaN payloads": "NaN with any bits in pools and in new content, which are moved as they are",
        "NaN and infinity": "NaN and infinity among the wider numbers that are divided and rounded",
        "NaN in free slots": "slots of no request, and those behind a request's last token, hold NaN, not numbers",
        "window": "queries that see only so many tokens, with null blocks below them",
        "skip": "leading blocks of an object that are not moved",
    }
)
"""Features that a kernel may lack, by name."""

UNASKED = ("missing ids",)
"""Features that are asked only of a kernel that says it has them."""

MAY_HAVE = (*UNASKED, "NaN payloads")
"""Features that a kernel may say it has; JAX on a CPU quiets NaNs unless a function takes care."""


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call.

    Attributes:
      operation: one of `OPERATIONS`.
      layout, content, dtype, block_size, heads, key_size, value_size, blocks, layers, pieces, padding, offset: as
        `hkv.testing.kernels.placement.place` takes them. For chunks `layout` is a format by name, and `padding` are
        elements after each block.
      layer: layer that is written or read.
      slots: of a write, `block * block_size + slot` of each token, -1 for padding.
      table: block ids: of a table, to zero, to copy from, or of chunks, object by object.
      targets: block ids to copy to.
      source_dtype: element type of new keys and values where the kernel converts them, else empty.
      scales: of keys and of values, where there is one each for the whole tensor.
      row_padding: elements after each token of the inputs.
      tables: one row of block ids for each request of an attention.
      queries: new tokens of each request.
      lengths: tokens of each request, the new ones included.
      query_heads: query heads for each head.
      window: tokens that a query sees, 0 for all.
      poison: NaN is in the slots that no query may read, else numbers.
      payloads: a pool and new content have NaNs of any bits, else none.
      extremes: NaN and infinity are among the numbers that are rounded.
      objects: chunks.
      skip: leading ids that are not moved.
      seed: of all contents.
    """

    operation: str
    layout: str = "LBNHC"
    content: str = "keys and values"
    dtype: str = "bfloat16"
    block_size: int = 2
    heads: int = 2
    key_size: int = 2
    value_size: int = 2
    blocks: int = 3
    layers: int = 1
    pieces: int = 1
    padding: int = 0
    offset: int = 0
    layer: int = 0
    slots: tuple[int, ...] = ()
    table: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    source_dtype: str = ""
    scales: tuple[float, float] = (1.0, 1.0)
    row_padding: int = 0
    tables: tuple[tuple[int, ...], ...] = ()
    queries: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    query_heads: int = 1
    window: int = 0
    poison: bool = True
    payloads: bool = True
    extremes: bool = False
    objects: int = 0
    skip: int = 0
    seed: int = 0

    def placement(self) -> Placement:
        """Addresses of the pool; LayoutError where there are none."""
        return place(
            self.layout,
            self.content,
            self.dtype,
            block_size=self.block_size,
            heads=self.heads,
            key_size=self.key_size,
            value_size=self.value_size,
            blocks=self.blocks,
            layers=self.layers,
            pieces=self.pieces,
            padding=self.padding,
            offset=self.offset,
        )

    def __str__(self) -> str:
        """The sizes in words."""
        pieces = f" in {self.pieces} kernel blocks" if self.pieces > 1 else ""
        both = self.key_size == self.value_size or self.content == "latent"
        size = str(self.key_size) if both else f"{self.key_size} and {self.value_size}"
        layers, blocks, slots, heads = (
            f"{count} {name}{'s' if count != 1 else ''}"
            for count, name in (
                (self.layers, "layer"),
                (self.blocks, "block"),
                (self.block_size, "slot"),
                (self.heads, "head"),
            )
        )
        shape = f"{blocks} of {slots}{pieces}, {heads} of {size} element{'s' if size != '1' else ''}"
        extra = "".join(
            f", {name} {value}"
            for name, value in (("padding", self.padding), ("offset", self.offset), ("window", self.window))
            if value
        )
        return f"{self.layout}, {self.content}, {self.dtype}, {layers}, {shape}{extra}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supports:
    """Properties of a kernel: how it is called, and what may be asked of it.

    Attributes:
      operation: one of `OPERATIONS`.
      arrays: `numpy`, `torch` or `jax`; empty for what the function's module imports.
      layouts: names of families or of chunk formats, with `*`; none for all.
      contents: contents of a cell; none for all.
      dtypes: element types; none for all.
      lacks: names of `FEATURES` that are not asked.
      has: names of `MAY_HAVE` that are asked all the same.
      axes: order of the axes of caches that it takes: B kernel blocks, H heads, N slots, D elements, S for B and N as
        one axis. H may be left out where there is one head.
      block_sizes, heads, head_sizes, tokens: sizes to choose from, tokens those of a write; none for small ones.
      arguments: names of what a C function takes, in order; a Python function's own parameters say it.
      functional: returns the changed arrays in place of changing them; None for what the arrays do.
      reuse: draws of one geometry, where each costs a compilation.
      tolerance: of attention, absolute and relative.
    """

    operation: str = ""
    arrays: str = ""
    layouts: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    axes: str = "BNHD"
    block_sizes: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    head_sizes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()
    functional: bool | None = None
    reuse: int = 1
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # a name alone, or a number, is one of them
            if field.default == () and isinstance(value := getattr(self, field.name), str | int):
                object.__setattr__(self, field.name, (value,))
        if self.operation and self.operation not in OPERATIONS:
            raise ConfigError("operation", self.operation, f"one of {', '.join(OPERATIONS)}")
        for field, allowed in (("lacks", FEATURES), ("has", MAY_HAVE), ("dtypes", DTYPES), ("contents", CONTENTS)):
            for name in getattr(self, field):
                if name not in allowed:
                    raise ConfigError(field, name, f"one of {', '.join(allowed)}")
        for name in self.layouts:
            if not fnmatch.filter((*FAMILIES, *FORMATS), name):
                raise ConfigError("layouts", name, f"one of {', '.join((*FAMILIES, *FORMATS))}, or a pattern")
        if not set(self.axes) <= set("BNHDS") or len(set(self.axes)) != len(self.axes) or "D" not in self.axes:
            raise ConfigError("axes", self.axes, "letters of BNHDS, each once, D among them")

    def known_layouts(self, names: Sequence[str]) -> list[str]:
        """Those of some names that the kernel takes; all of them where it takes none, to be counted as not asked."""
        known = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.layouts)]
        return known or list(names)

    def not_asked(self, case: Case) -> tuple[str, ...]:
        """Names of what the case has and the kernel does not support."""
        found = [name for name in features_of(case) if name in self.lacks or (name in UNASKED and name not in self.has)]
        if self.layouts and not any(fnmatch.fnmatchcase(case.layout, name) for name in self.layouts):
            found.append(f"layout {case.layout}")
        if self.contents and case.content not in self.contents:
            found.append(case.content)
        if self.dtypes and case.dtype not in self.dtypes:
            found.append(case.dtype)
        return tuple(found)

    def lists_sizes_of(self, case: Case) -> bool:
        """True if a case has sizes that the kernel lists, where it lists any; latents have one head all the same."""
        listed = (
            *((self.head_sizes, size) for size in (case.key_size, case.value_size)),
            (self.block_sizes, case.block_size),
            (self.heads if case.content != "latent" else (), case.heads),
            (self.tokens if case.operation == "write" else (), len(case.slots)),
        )
        return all(not sizes or size in sizes for sizes, size in listed)


FORMATS = tuple(form.name for form in EngineKVFormat if TRAITS[form].kernel)
"""Names of the chunk formats."""


def features_of(case: Case) -> tuple[str, ...]:
    """Names of `FEATURES` that a case has."""
    ids = (*case.table, *case.targets, *(block for row in case.tables for block in row))
    last, floats = case.blocks * case.block_size, case.dtype not in INTEGERS
    highest = max((*ids, *(slot // case.block_size for slot in case.slots)), default=0)
    has = {
        "padding tokens": -1 in ids or -1 in case.slots,
        "null block": 0 in (case.table if case.operation in ("gather", "scatter") else ()),
        "missing ids": any(not -1 <= block < case.blocks for block in ids)
        or any(not -1 <= slot < last for slot in case.slots),
        "split blocks": case.pieces > 1,
        "padded pages": case.padding > 0,
        "offset": case.offset > 0,
        "strided inputs": case.row_padding > 0,
        "two sizes": case.key_size != case.value_size and case.content != "latent",
        "tensor scales": bool(case.source_dtype) and case.content != SCALED,
        "own scales": bool(case.source_dtype) and case.content == SCALED,
        "far blocks": is_far(case) and highest >= case.blocks - 9,
        "overlapping copies": bool(set(case.table) & set(case.targets)) and case.operation == "copy_blocks",
        "repeated ids": case.operation == "zero" and len(set(case.table)) < len(case.table),
        "NaN payloads": case.payloads and case.operation in MOVING and (floats or case.content == SCALED),
        "NaN and infinity": case.extremes,
        "NaN in free slots": case.operation == "attention" and case.poison,
        "window": case.window > 0,
        "skip": case.skip > 0,
    }
    return tuple(name for name, present in has.items() if present)


def is_far(case: Case) -> bool:
    """True if the pool has more than 2^31 elements."""
    return case.blocks > 1 << 12


class Unavailable(Exception):  # noqa: N818
    """A case cannot be given to a kernel; the message names what is not asked."""


MAX_SIZE = 1 << 12
"""Most elements, heads, slots, layers and ids of a case: each element is visited by the definition's loops."""


def check_case(case: Case) -> None:
    """Raises ConfigError or LayoutError for a case that cannot be performed."""
    if case.operation not in OPERATIONS:
        raise ConfigError("operation", case.operation, f"one of {', '.join(OPERATIONS)}")
    for name, least in (
        *((name, 1) for name in ("block_size", "heads", "key_size", "value_size", "blocks", "layers", "pieces")),
        *((name, 0) for name in ("padding", "offset", "row_padding", "window", "skip", "seed", "layer")),
        ("query_heads", 1),
    ):
        most = 1 << 30 if name in ("blocks", "seed") else MAX_SIZE
        if not least <= getattr(case, name) <= most:
            raise ConfigError(name, getattr(case, name), f"a number from {least} to {most}")
    ids = (*case.slots, *case.table, *case.targets, *(block for row in case.tables for block in row))
    if len(ids) > MAX_SIZE or any(abs(number) >= 1 << 31 for number in (*case.table, *case.targets)):
        raise ConfigError("ids", len(ids), f"at most {MAX_SIZE} ids of 32 bits")
    if case.layer >= case.layers:
        raise ConfigError("layer", case.layer, f"less than {case.layers}")
    needed = case.tables if case.operation == "attention" else case.table if case.operation in CHUNKED else True
    if not needed or len(case.targets) != (len(case.table) if case.operation == "copy_blocks" else 0):
        raise ConfigError("ids", [case.slots, case.table, case.targets], f"those of {case.operation}")
    if case.operation in CHUNKED:
        if case.layout not in FORMATS or case.objects < 1 or len(case.table) % case.objects:
            raise ConfigError("layout", case.layout, f"one of {', '.join(FORMATS)}, and as many blocks in each object")
        return
    if case.operation == "attention":
        _check_requests(case)
    for name, known in (("layout", FAMILIES), ("content", CONTENTS)):
        if getattr(case, name) not in known:
            raise ConfigError(name, getattr(case, name), f"one of {', '.join(known)}")
    case.placement()


def _check_requests(case: Case) -> None:
    rows, columns = len(case.tables), {len(row) for row in case.tables}
    if len(case.lengths) != rows or len(case.queries) != rows or len(columns) != 1:
        raise ConfigError("tables", case.tables, "a row of equal width, a length and new tokens for each request")
    for length, new in zip(case.lengths, case.queries, strict=True):
        if not 1 <= new <= length <= min(columns) * case.block_size:
            raise ConfigError("lengths", case.lengths, "no more than the row holds, and no less than the new tokens")
    if any(not 0 <= block < case.blocks for row in case.tables for block in row):
        raise ConfigError("tables", case.tables, f"blocks from 0 to {case.blocks - 1}")
