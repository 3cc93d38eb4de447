"""LMCache 0.5.6's chunk keys: a blake3 chain over whole chunks of tokens. Host-only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hkv.errors import MissingExtraError, OperationError

_FORBIDDEN_IN_SALT = "@/\\\0"
_MAX_SALT = 128


def hash_chunk(prefix: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a chunk: blake3 of the key before it and each token, from 0 to 2^32 - 1, as a big-endian uint32.

    Raises:
      OperationError: a token out of range.
      MissingExtraError: blake3 is not installed.
    """
    for token in tokens:
        if not 0 <= token < 1 << 32:
            raise OperationError("tokens", token, "token ids from 0 to 2^32 - 1")
    return _blake3(prefix + b"".join(int(token).to_bytes(4, "big") for token in tokens))


def none_hash() -> bytes:
    """The chain's root: the key of the one token 0 after an eight-byte zero."""
    return hash_chunk((0).to_bytes(8, "big", signed=True), [0])


def chunk_keys(tokens: Sequence[int], chunk: int, start: int = 0, end: int | None = None) -> list[bytes]:
    """Keys of the whole chunks of `tokens[start:end]`, which chain over all tokens from position 0.

    Raises:
      OperationError: a bound off the grid of chunks or beyond the tokens.
    """
    whole = len(tokens) // chunk * chunk
    end = whole if end is None else end
    for name, bound in (("start", start), ("end", end)):
        if bound % chunk or not 0 <= bound <= len(tokens):
            raise OperationError(name, bound, f"a multiple of {chunk} up to {len(tokens)} tokens")
    keys: list[bytes] = []
    prefix = none_hash()
    for position in range(0, end, chunk):
        prefix = hash_chunk(prefix, tokens[position : position + chunk])
        keys.append(prefix)
    return keys[start // chunk :]


@dataclasses.dataclass(frozen=True)
class ObjectKey:
    """Name of one chunk object (LMCache 0.5.6 `ObjectKey`).

    `chunk_hash` is the same for every object group; `kv_rank` says which heads; the salt keeps users apart.
    """

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if "@" in self.model_name:
            raise OperationError("model_name", self.model_name, "a name without @")
        if len(self.cache_salt) > _MAX_SALT or set(self.cache_salt) & set(_FORBIDDEN_IN_SALT):
            raise OperationError("cache_salt", self.cache_salt, f"at most {_MAX_SALT} characters, none of @ / \\ NUL")


def kv_rank(world: int, rank: int, local_world: int, local_rank: int) -> int:
    """World size, global rank, local world size and local rank, one byte each, in one int."""
    parts = {"world": world, "rank": rank, "local_world": local_world, "local_rank": local_rank}
    for name, value in parts.items():
        if not 0 <= value < 256:
            raise OperationError(name, value, "0 to 255")
    return world << 24 | rank << 16 | local_world << 8 | local_rank


def _blake3(data: bytes) -> bytes:
    try:
        import blake3
    except ImportError as error:
        raise MissingExtraError("blake3", "hashes", "for LMCache's chunk keys") from error
    return blake3.blake3(data).digest()
