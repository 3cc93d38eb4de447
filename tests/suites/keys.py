"""Keys: equal exactly when everything that shapes the cached content is equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from hkv.contract.traffic import Choices
from hkv.keys import blake3
from hkv.keys.chained import KeyChain, PrefixIdentity, digest_by_name, event_hash, group_key
from reference.keys.views import block_keys
from tests.suites.suite import CaseSuite, case_check


@dataclasses.dataclass(frozen=True)
class TwoTexts:
    """Two texts with what identifies them beside their tokens. Hash blocks have `size` tokens, and keys cover
    `lookahead` more; a larger group's block is `scale` hash blocks; the first text grows at the `cuts`.
    """

    size: int
    lookahead: int
    scale: int
    tokens: tuple[tuple[int, ...], tuple[int, ...]]
    identities: tuple[PrefixIdentity, PrefixIdentity]
    cuts: tuple[int, ...]

    def chain(self, text: int) -> KeyChain:
        """The keys of a text, computed at once."""
        chain = KeyChain(digest_by_name("sha256_cbor"), self.size, self.lookahead, self.identities[text])
        chain.extend(self.tokens[text])
        return chain

    def content(self, text: int, block: int) -> tuple[object, ...]:
        """All that the content of the first `block + 1` hash blocks depends on."""
        identity, end = self.identities[text], (block + 1) * self.size
        until = end + self.lookahead
        items = tuple((name, offset) for name, offset, _ in identity.multimodal if offset < until)
        embeds = None if identity.embeds is None else identity.embeds[:until]
        return (self.tokens[text][:until], identity.lora, items, identity.salt or None, embeds)


NAMES = ("x", "y", "x" * 20)


def draw_texts(choices: Choices) -> TwoTexts:
    """Two texts that share a prefix, and perhaps all but one thing."""
    size = choices.integer(1, 4)
    length = choices.integer(1, 6) * size + choices.integer(0, 2)
    first = tuple(choices.integer(0, 2) for _ in range(length))
    shared = choices.integer(0, length)
    second = (
        first if choices.chance(50) else first[:shared] + tuple(choices.integer(0, 2) for _ in range(length - shared))
    )
    identity = _draw_identity(choices, length)
    other = _changed(choices, identity, length) if choices.chance(70) else identity
    cuts = tuple(sorted(choices.integer(0, length) for _ in range(2)))
    return TwoTexts(size, choices.pick((0, 0, 1, 2)), choices.integer(1, 3), (first, second), (identity, other), cuts)


def _draw_identity(choices: Choices, length: int) -> PrefixIdentity:
    name = choices.pick(NAMES)
    return PrefixIdentity(
        lora=(name, name) if choices.chance(30) else None,
        multimodal=_draw_items(choices, length) if choices.chance(50) else (),
        salt=choices.pick(("", *NAMES)) if choices.chance(30) else None,
        embeds=tuple(bytes([choices.integer(0, 1)]) for _ in range(length)) if choices.chance(20) else None,
    )


def _draw_items(choices: Choices, length: int) -> tuple[tuple[str, int, int], ...]:
    offset = choices.integer(0, length - 1)
    return ((choices.pick(NAMES), offset, 1),)


def _changed(choices: Choices, identity: PrefixIdentity, length: int) -> PrefixIdentity:
    """Another identity, in one thing: an adapter's name as a salt, another image, nothing at all."""
    name = identity.lora[0] if identity.lora else identity.salt or choices.pick(NAMES)
    return choices.pick(
        (
            dataclasses.replace(identity, lora=None, salt=name),
            dataclasses.replace(identity, lora=(name, name), salt=None),
            dataclasses.replace(identity, lora=(name, name + "'")),
            dataclasses.replace(identity, multimodal=_draw_items(choices, length)),
            dataclasses.replace(identity, salt=None),
            dataclasses.replace(identity, embeds=tuple(bytes([choices.integer(0, 1)]) for _ in range(length))),
            PrefixIdentity(),
        )
    )


@case_check("typed keys", "B-I6")
def typed(case: TwoTexts) -> Iterator[str]:
    """Two texts have the same key at a block exactly when all that its content depends on is the same."""
    first, second = case.chain(0).keys, case.chain(1).keys
    for block in range(min(len(first), len(second))):
        same = case.content(0, block) == case.content(1, block)
        if same != (first[block] == second[block]):
            yield f"block {block} has {'different keys' if same else 'one key'} for {'one' if same else 'two'} contents"


@case_check("keys as they come", "B-I6")
def incremental(case: TwoTexts) -> Iterator[str]:
    """Keys computed while a text grows are those computed at once, one for every block that is complete."""
    chain = KeyChain(digest_by_name("sha256_cbor"), case.size, case.lookahead, case.identities[0])
    for cut in (*case.cuts, len(case.tokens[0])):
        chain.extend(case.tokens[0][:cut])
        if len(chain.keys) != max(0, cut - case.lookahead) // case.size:
            yield f"{cut} tokens have {len(chain.keys)} keys in blocks of {case.size}, {case.lookahead} looked ahead at"
    if chain.keys != case.chain(0).keys:
        yield "keys depend on how the text grew"


@case_check("closing hash", "B-I30")
def closing(case: TwoTexts) -> Iterator[str]:
    """A larger block is filed under the hash that closes it: where texts differ inside it, its keys differ."""
    views = [block_keys(case.chain(text).keys, case.size, case.size * case.scale) for text in (0, 1)]
    for text, view in enumerate(views):
        whole = len(case.chain(text).keys) // case.scale
        if len(view) != whole:
            yield f"{len(view)} blocks of {case.scale} hash blocks among {len(case.chain(text).keys)}"
            return
    for column in range(min(map(len, views))):
        last = (column + 1) * case.scale - 1
        same = case.content(0, last) == case.content(1, last)
        if same != (views[0][column] == views[1][column]):
            yield f"column {column} has {'different keys' if same else 'one key'}, the texts up to it say otherwise"


@case_check("key width", "B-I6")
def width(case: TwoTexts) -> Iterator[str]:
    """Group and event forms of a key keep every bit that they promise."""
    for key in case.chain(0).keys:
        if group_key(key, 300) == group_key(key, 44) or group_key(key, 1)[: len(key)] != key:
            yield "two groups share one name"
        if event_hash(key) != int.from_bytes(key[-8:], "big"):
            yield "the event's hash is not the key's last eight bytes"


@case_check("chunk keys", "B-I6", "B-I30")
def chunk_keys(case: TwoTexts) -> Iterator[str]:
    """Keys of chunks chain over everything before; a later start gives the same keys, cut."""
    chunk = case.size
    both = [blake3.chunk_keys(tokens, chunk) for tokens in case.tokens]
    for index in range(min(map(len, both))):
        end = (index + 1) * chunk
        if (both[0][index] == both[1][index]) != (case.tokens[0][:end] == case.tokens[1][:end]):
            yield f"chunk {index}: its keys and the tokens up to {end} say different things"
    for start in range(0, len(both[0]) + 1):
        if blake3.chunk_keys(case.tokens[0], chunk, start * chunk, len(both[0]) * chunk) != both[0][start:]:
            yield f"the keys from chunk {start} on are others than those of the whole"
    ranks = {blake3.kv_rank(*shape) for shape in ((2, 1, 2, 1), (2, 1, 2, 0), (2, 0, 2, 1), (1, 1, 2, 1), (2, 1, 1, 1))}
    if len(ranks) != 5:
        yield "two ranks share one number"


SUITE = CaseSuite(
    "keys", "chain keys and chunk keys of pairs of texts", draw_texts, (typed, incremental, closing, width, chunk_keys)
)
