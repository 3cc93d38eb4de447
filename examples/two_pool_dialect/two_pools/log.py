"""Operations of the cache and their answers."""

import msgspec

from hkv.contract.log import LogFormat, PlainOperation, PooledHeader
from hkv.errors import ConfigError


class Allocation(msgspec.Struct):
    """Tokens found in the cache, and new blocks of each pool; None when refused."""

    hit: int
    blocks: list[list[int]] | None


class State(msgspec.Struct):
    """Ids of free blocks of each pool, ascending; of each cached page, its block in each pool (-1 where it has none),
    its parent's block (-1: none) and the users of both; the blocks of each pool that requests hold alone; and the
    window's blocks in shared pages that running requests read."""

    free: list[list[int]]
    cached: list[list[int]]
    held: list[list[int]]
    read: list[int]


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
    """A request ends; `keep`: its whole pages are entered into the cache."""

    id: str
    keep: bool


class StateOp(PlainOperation, tag="state"):
    """The whole cache is looked at."""

    want: State | None = None


def check(header: PooledHeader) -> None:
    """Raises a ConfigError unless there are a group of full attention and a window, in pages of one size."""
    kinds = [group["kind"] for group in header.groups]
    if kinds != ["full_attention", "sliding_window"] or len({group["block_size"] for group in header.groups}) != 1:
        raise ConfigError("groups", header.groups, "full attention and a window, with blocks of one size")
    if len(header.num_blocks) != len(kinds) or min(header.num_blocks) < 1:
        raise ConfigError("num_blocks", header.num_blocks, "blocks of each of the two pools")


FORMAT = LogFormat(PooledHeader, (AdmitOp, AppendOp, FreeOp, StateOp), check)
