"""Sentences of documents with figures in them: found, compared with what was measured, and written anew."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal

WORDS: list[str] = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty",
)
"""Numbers that a sentence may spell."""

NUMBER = rf"\d+(?:,\d{{3}})*(?:\.\d+)?|(?i:\b(?:{'|'.join(WORDS)})\b)"

Figure = int | float | Decimal


class NotQuotedError(ValueError):
    """A document does not have a sentence that it should have, or has it more than once."""


@dataclasses.dataclass(frozen=True)
class Quotation:
    """A sentence of a document, or a part of one.

    Attributes:
      template: its words, `{name}` where a figure stands. Where lines are broken does not matter.
    """

    template: str

    @property
    def names(self) -> tuple[str, ...]:
        """Its figures, in order."""
        return tuple(re.findall(r"\{(\w+)\}", self.template))

    def figures(self, page: str) -> dict[str, str]:
        """The figures as a page has them.

        Raises:
          NotQuotedError: it is not there, or more than once.
        """
        return self._match(page).groupdict()

    def span(self, page: str) -> tuple[int, int]:
        """Place on the page, as a range of characters.

        Raises:
          NotQuotedError: it is not there, or more than once.
        """
        return self._match(page).span()

    def rewritten(self, page: str, figures: Mapping[str, Figure]) -> str:
        """The page with these figures in place of its own, each as exact and as it is written there.

        Raises:
          NotQuotedError: it is not there, or more than once.
        """
        match = self._match(page)
        for name in sorted(figures, key=match.start, reverse=True):
            start, end = match.span(name)
            page = page[:start] + as_exact_as(match[name], figures[name]) + page[end:]
        return page

    def _match(self, page: str) -> re.Match[str]:
        parts = re.split(r"\{(\w+)\}", self.template)
        pattern = ""
        for index, part in enumerate(parts):
            words = r"\s+".join(re.escape(word) for word in re.split(r"\s+", part))
            pattern += f"(?P<{part}>{NUMBER})" if index % 2 else words
        found = list(re.finditer(pattern, page))
        if len(found) != 1:
            raise NotQuotedError(f"{self.template!r} stands {len(found)} times in the document, not once")
        return found[0]


def parsed(text: str) -> Decimal:
    """A figure as it is written: digits with commas, or a word."""
    if text.lower() in WORDS:
        return Decimal(WORDS.index(text.lower()))
    return Decimal(text.replace(",", ""))


def as_exact_as(written: str, figure: Figure) -> str:
    """A figure in the form of another one that is written: its decimals, its commas, or a word."""
    decimals = len(written.partition(".")[2])
    rounded = Decimal(str(figure)).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    if written.lower() in WORDS and rounded == int(rounded) and 0 <= rounded < len(WORDS):
        word = WORDS[int(rounded)]
        return word.capitalize() if written[0].isupper() else word
    bare = len(written.partition(".")[0]) > 3 and "," not in written
    return f"{rounded}" if bare else f"{rounded:,}"
