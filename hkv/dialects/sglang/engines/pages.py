"""Numbers of pages, and requests as the host knows them: what engines that compute with numbers make of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

Namespace: TypeAlias = tuple[str | None, str | None]
"""SGLang's `extra_key` (an adapter's, say) and `cache_salt`, by which tokens are cached apart."""


@dataclasses.dataclass
class HostRequest:
    """A request as the host knows it: its slot in the cache, its tokens, and what they are cached apart by."""

    slot: int
    tokens: list[int]
    namespace: Namespace


class Pages:
    """Numbers of pages, which are equal if namespace and all units up to their end are.

    A unit is a token; under EAGLE it is a bigram, because a draft layer reads each token together with the next one: n
    tokens then make n - 1 units, and unit i stands for the slot of token i.

    Args:
      size: units of a page.
      bigrams: whether a unit is a token and the next one.
    """

    def __init__(self, size: int, *, bigrams: bool) -> None:
        self._size, self._bigrams = size, bigrams
        self._numbers: dict[tuple[Any, tuple[int, ...]], int] = {}
        self._known: list[tuple[Any, tuple[int, ...]]] = []

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tokens: Sequence[int], namespace: Namespace) -> list[int]:
        """Numbers of the whole pages of some tokens."""
        before: Any = namespace
        found, whole = [], max(0, len(tokens) - self._bigrams) // self._size
        for page in range(whole):
            # Of bigrams the token after the page is the last one's second.
            own = tuple(tokens[page * self._size : (page + 1) * self._size + self._bigrams])
            before = self._numbers.setdefault((before, own), len(self._known))
            if before == len(self._known):
                self._known.append((found[-1] if found else namespace, own))
            found.append(before)
        return found

    def tokens(self, numbers: Sequence[int]) -> list[int]:
        """Tokens of pages that follow each other; of bigrams, the one after the last, too."""
        named = [self._known[number][1] for number in numbers]
        return [token for own in named for token in own[: self._size]] + list(named[-1][self._size :])

    def namespace(self, number: int) -> Namespace:
        """Namespace under which a page is cached apart."""
        before: Any = number
        while isinstance(before, int):
            before = self._known[before][0]
        return before
