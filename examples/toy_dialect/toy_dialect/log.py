"""Operations of the radix cache and their answers."""

import msgspec

from hkv.contract.log import LogFormat, PlainHeader, PlainOperation
from hkv.errors import ConfigError


class Allocation(msgspec.Struct):
    """Tokens found in the cache, and blocks: of an admission all that the request has; None when refused."""

    hit: int
    blocks: list[int] | None


class State(msgspec.Struct):
    """Ids of free blocks, ascending, and block, parent's block (-1: none) and users of each cached one, by block."""

    free: list[int]
    cached: list[list[int]]


class AdmitOp(PlainOperation, tag="admit"):
    """A request comes with its tokens, and runs unless it is refused."""

    id: str
    tokens: list[int]
    want: Allocation | None = None


class AppendOp(PlainOperation, tag="append"):
    """A request grows by some tokens, unless it is refused blocks for them."""

    id: str
    tokens: list[int]
    want: Allocation | None = None


class FreeOp(PlainOperation, tag="free"):
    """A request ends; `keep`: its whole blocks are entered into the cache."""

    id: str
    keep: bool


class StateOp(PlainOperation, tag="state"):
    """The whole cache is looked at."""

    want: State | None = None


def check(header: PlainHeader) -> None:
    """Raises a ConfigError unless there is one group of full attention, and a block."""
    if [group["kind"] for group in header.groups] != ["full_attention"] or header.num_blocks < 1:
        raise ConfigError("groups", header.groups, "one group of full attention, and a block at least")


FORMAT = LogFormat(PlainHeader, (AdmitOp, AppendOp, FreeOp, StateOp), check)
