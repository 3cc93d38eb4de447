"""Chained prefix keys: each covers one hash block of tokens, what else identifies them, and the key before it.

Host-only. The scheme is vLLM 0.33's (`hash_block_tokens`, `generate_block_hash_extra_keys` and `Request.block_hashes`),
so that keys can be compared with recorded ones byte by byte.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import pickle
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias

from hkv.errors import ConfigError, MissingExtraError, OperationError

Digest: TypeAlias = Callable[[Any], bytes]
"""A hash of any value made of tuples, ints, strings, bytes and None."""

SEED = "vllm-none-hash"
"""String whose hash is the root key, unless another seed is given (vLLM 0.33, with PYTHONHASHSEED unset)."""

EVENT_MASK = (1 << 64) - 1


def sha256(value: Any) -> bytes:
    """SHA-256 of the value's newest pickle. Depends on object identity: equal values may hash differently."""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def sha256_cbor(value: Any) -> bytes:
    """SHA-256 of the value's canonical CBOR; depends on nothing but the value."""
    return hashlib.sha256(_cbor()(value, canonical=True)).digest()


def xxhash(value: Any) -> bytes:
    """128-bit XXH3 of the value's newest pickle."""
    return _xxh3(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def xxhash_cbor(value: Any) -> bytes:
    """128-bit XXH3 of the value's canonical CBOR."""
    return _xxh3(_cbor()(value, canonical=True))


@functools.cache
def _cbor() -> Callable[..., bytes]:
    """The encoder, loaded with the first key: plans, which need no keys, do without its package."""
    return importlib.import_module("cbor2").dumps


def _xxh3(data: bytes) -> bytes:
    try:
        library = importlib.import_module("xxhash")
    except ImportError:
        raise MissingExtraError("xxhash", "hashes", "for the chain hashes xxhash and xxhash_cbor") from None
    return library.xxh3_128_digest(data)


DIGESTS: dict[str, Digest] = {
    "sha256": sha256,
    "sha256_cbor": sha256_cbor,
    "xxhash": xxhash,
    "xxhash_cbor": xxhash_cbor,
}
"""Every chain hash that can be computed, by its name in configurations and logs."""


def digest_by_name(name: str) -> Digest:
    """The chain hash of that name; ConfigError for an unknown one."""
    try:
        return no_digest if name == GIVEN else DIGESTS[name]
    except KeyError:
        raise ConfigError("hash", name, f"one of {', '.join(DIGESTS)}") from None


def root_key(digest: Digest, seed: str = SEED) -> bytes:
    """Parent key of the first block (vLLM 0.33 `NONE_HASH`).

    vLLM takes its seed from PYTHONHASHSEED where that is set, and draws a random one for the xxhash family; here the
    environment changes nothing, and every hash starts from `SEED` unless told otherwise.
    """
    return digest(seed)


def block_key(digest: Digest, parent: bytes | None, tokens: Sequence[int], extra: tuple[Any, ...] | None) -> bytes:
    """The key of one hash block (vLLM 0.33 `hash_block_tokens`).

    `parent` is the key before it, None for the first, which follows `root_key`; `extra` is what `extra_keys` says.
    """
    return digest((parent or root_key(digest), tuple(tokens), extra))


def group_key(key: bytes, group: int) -> bytes:
    """A key and the group whose block it names: 4 big-endian bytes after it (vLLM `make_block_hash_with_group_id`)."""
    return key + group.to_bytes(4, "big")


def event_hash(key: bytes) -> int:
    """The key as KV events publish it by default: its last 8 bytes, big-endian (vLLM 0.33)."""
    return int.from_bytes(key, "big") & EVENT_MASK


@dataclasses.dataclass(frozen=True)
class PrefixIdentity:
    """Everything besides its tokens that identifies a request's prefix.

    Attributes:
      lora: name and path of the adapter, or None.
      multimodal: identifier, offset and length of each item, offsets and lengths in tokens, in order of offset and
        apart from one another.
      salt: cache salt; None and "" both mean none.
      embeds: bytes of each token's prompt embedding, or None.

    Raises:
      OperationError: items out of order, overlapping or empty.
    """

    lora: tuple[str, str] | None = None
    multimodal: tuple[tuple[str, int, int], ...] = ()
    salt: str | None = None
    embeds: tuple[bytes, ...] | None = None

    def __post_init__(self) -> None:
        end = 0
        for name, offset, length in self.multimodal:
            if offset < end or length < 1:
                expected = f"items of positive length, the one called {name!r} at offset {end} or later"
                raise OperationError("multimodal", (name, offset, length), expected)
            end = offset + length


PLAIN = PrefixIdentity()
"""A request that its tokens alone identify."""


def extra_keys(identity: PrefixIdentity, start: int, end: int) -> tuple[Any, ...] | None:
    """Extra keys that the key of `[start, end)` covers besides its tokens (vLLM 0.33 `generate_block_hash_extra_keys`).

    In this order: the adapter; every multimodal item that overlaps the span, with its offset from `start`, which is
    negative for one that began earlier; the salt, in the first block only; a digest of the span's prompt embeddings.

    Returns:
      A tuple of tagged tuples, or None when there is nothing.
    """
    found: list[tuple[Any, ...]] = []
    if identity.lora is not None:
        found.append(("lora", *identity.lora))
    for name, offset, length in identity.multimodal:
        if offset < end and offset + length > start:
            found.append(("mm", name, offset - start))
    if start == 0 and identity.salt:
        found.append(("cache_salt", identity.salt))
    if identity.embeds is not None:
        found.append(("prompt_embeds", hashlib.sha256(b"".join(identity.embeds[start:end])).digest()))
    return tuple(found) or None


class KeyChain:
    """The keys of one request, one for each hash block it has completely; grows with its tokens, never shrinks.

    With a lookahead of L, the key of `[start, end)` also covers the L tokens after it, as its extra keys
    `(extra, token[end], ..., token[end + L - 1])`; it exists once those tokens do.

    Attributes:
      keys: key i covers the tokens `[0, (i + 1) * hash_block_size)`, by covering key i - 1.
    """

    def __init__(
        self,
        digest: Digest,
        hash_block_size: int,
        lookahead: int = 0,
        identity: PrefixIdentity = PLAIN,
        seed: str = SEED,
    ) -> None:
        self.keys: list[bytes] = []
        self._digest = digest
        self._root = root_key(digest, seed)
        self._size = hash_block_size
        self._lookahead = lookahead
        self._identity = identity

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds the keys that became possible, of all tokens of the request so far, prompt and output."""
        while (len(self.keys) + 1) * self._size + self._lookahead <= len(tokens):
            start = len(self.keys) * self._size
            end = start + self._size
            extra = extra_keys(self._identity, start, end + self._lookahead)
            if self._lookahead:
                extra = (extra, *tokens[end : end + self._lookahead])
            parent = self.keys[-1] if self.keys else self._root
            self.keys.append(block_key(self._digest, parent, tokens[start:end], extra))

    def cut(self, tokens: int, hash_block_size: int, identity: PrefixIdentity | None = None) -> None:
        """Forget the keys of blocks that are not whole in the first `tokens` tokens (a streaming session goes on).

        What a lookahead covered of tokens that are gone, the keys before them still cover, as in vLLM 0.33
        `_update_request_as_session`. Another identity holds from now on.
        """
        del self.keys[tokens // hash_block_size :]
        self._identity = self._identity if identity is None else identity


class GivenKeys:
    """The keys of one request where they are given and not computed: another hash, or none."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def give(self, keys: Sequence[str]) -> None:
        """Adds keys in hex; OperationError for a text that is not."""
        try:
            self.keys += [bytes.fromhex(key) for key in keys]
        except ValueError:
            raise OperationError("keys", list(keys), "hex digits, two a byte") from None

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds nothing: keys come as they are given."""
        del tokens

    def cut(self, tokens: int, hash_block_size: int, identity: PrefixIdentity | None = None) -> None:
        """Forget the keys of blocks that are not whole in the first `tokens` tokens; others may be given."""
        del identity
        del self.keys[tokens // hash_block_size :]


GIVEN = "given"
"""Name of the chain hash in configurations whose requests bring their keys."""


def no_digest(value: Any) -> bytes:
    """The chain hash of configurations whose requests bring their keys: it cannot be called."""
    raise OperationError("keys", value, "keys that are given, since the hash is not known")


# Dense numbers for prefix keys, so that compiled caches can look them up without hashing. Host-only.


class Interner:
    """Numbers keys in the order in which they come, from 0 on; a key's number never changes.

    Attributes:
      keys: the key of each number.
      places: for each number, which hash block of its request the key ends, from 0; a key names a whole prefix, so this
        is the same in every request.
    """

    def __init__(self) -> None:
        self.keys: list[Hashable] = []
        self.places: list[int] = []
        self._numbers: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def number(self, key: Hashable, place: int) -> int:
        """The number of a key that ends hash block `place`."""
        found = self._numbers.setdefault(key, len(self.keys))
        if found == len(self.keys):
            self.keys.append(key)
            self.places.append(place)
        return found

    def numbers(self, keys: Iterable[Hashable], first: int = 0) -> list[int]:
        """The numbers of consecutive keys of one request, the first of which ends hash block `first`."""
        return [self.number(key, place) for place, key in enumerate(keys, first)]

    def find(self, key: Hashable) -> int | None:
        """The number of a key, or None for one that never came."""
        return self._numbers.get(key)
