"""Claims of documents, and whether they still hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from benchmarks.quoted.console import difference, shown_in
from benchmarks.quoted.quotation import Figure, NotQuotedError, Quotation, as_exact_as, parsed


@dataclasses.dataclass(frozen=True)
class Spread:
    """Figures that differ from run to run: what is measured lies between two that are published, or not far off.

    Attributes:
      least, most: names of the published figures; the same twice where there is one.
      factor: how many times less than the least, or more than the most, still passes.
    """

    least: str
    most: str
    factor: float = 1.5

    def holds(self, published: Mapping[str, str], measured: Figure) -> bool:
        """True if a measured figure passes."""
        least, most = float(parsed(published[self.least])), float(parsed(published[self.most]))
        return least / self.factor <= float(measured) <= most * self.factor


@dataclasses.dataclass(frozen=True, eq=False)
class Claim:
    """A sentence with figures.

    Attributes:
      document: its path from the root.
      sentence: a template of `Quotation`.
      sources: names of what makes its figures.
      figures: from what each source says to the figures by name.
      spreads: by name, figures that are not quoted themselves but lie between two that are. All others are exact.
    """

    document: str
    sentence: str
    sources: tuple[str, ...]
    figures: Callable[..., Mapping[str, Figure]]
    spreads: Mapping[str, Spread] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        """Title in reports."""
        return f"{self.document}: {self.sentence}"

    def drift(self, page: str, made: list[Mapping[str, Any]]) -> list[str]:
        """Differences between the page and what was made; one line a figure."""
        quotation, found = Quotation(self.sentence), self._made(made)
        try:
            published = quotation.figures(page)
        except NotQuotedError as error:
            return [str(error)]
        problems = []
        for name, figure in found.items():
            if name in self.spreads:
                if not self.spreads[name].holds(published, figure):
                    spread = self.spreads[name]
                    band = f"{published[spread.least]} to {published[spread.most]}"
                    problems.append(f"{name}: {float(figure):.3g} is not near the published {band}")
            elif as_exact_as(published[name], figure) != published[name]:
                problems.append(f"{name}: published {published[name]}, made {as_exact_as(published[name], figure)}")
        return problems

    def rewritten(self, page: str, made: list[Mapping[str, Any]]) -> str:
        """The page with the exact figures as they were made; spreads are left for a person to judge."""
        exact = {name: figure for name, figure in self._made(made).items() if name not in self.spreads}
        return Quotation(self.sentence).rewritten(page, exact)

    def span(self, page: str) -> tuple[int, int]:
        """Place on the page.

        Raises:
          NotQuotedError: nowhere, or at several places.
        """
        return Quotation(self.sentence).span(page)

    def _made(self, made: list[Mapping[str, Any]]) -> dict[str, Decimal]:
        found = {name: parsed(str(figure)) for name, figure in self.figures(*made).items()}
        named = set(Quotation(self.sentence).names)
        ends = {end for spread in self.spreads.values() for end in (spread.least, spread.most)}
        if set(found) - set(self.spreads) != named - ends:
            raise ValueError(f"{self.title}: figures {sorted(found)} are made for {sorted(named)}")
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Lines between `<!-- marker -->` and `<!-- end -->`, all of which are made.

    Attributes:
      document: its path from the root.
      marker: what stands before them.
      sources: names of what makes them.
      lines: from what each source says to the lines.
      columns: how many columns of the table are compared; None for all. Others cannot be written.
    """

    document: str
    marker: str
    sources: tuple[str, ...]
    lines: Callable[..., list[str]]
    columns: int | None = None

    @property
    def title(self) -> str:
        """Title in reports."""
        part = "" if self.columns is None else f", {self.columns} columns"
        return f"{self.document}: table `{self.marker}`{part}"

    def drift(self, page: str, made: list[Mapping[str, Any]]) -> list[str]:
        """Differences between the page and what was made; one line each."""
        try:
            start, end = self.span(page)
        except NotQuotedError as error:
            return [str(error)]
        there = [self._part(line) for line in page[start:end].splitlines()]
        wanted = [self._part(line) for line in self.lines(*made)]
        lost = [f"published, not made: {line}" for line in there if line not in wanted]
        new = [f"made, not published: {line}" for line in wanted if line not in there]
        return lost + new or (["the lines stand in another order"] if there != wanted else [])

    def rewritten(self, page: str, made: list[Mapping[str, Any]]) -> str:
        """The page with the lines as they were made."""
        if self.columns is not None:
            return page
        start, end = self.span(page)
        return page[:start] + "\n".join(self.lines(*made)) + "\n" + page[end:]

    def span(self, page: str) -> tuple[int, int]:
        """Place of the lines on the page.

        Raises:
          NotQuotedError: nowhere, or at several places.
        """
        begin = f"<!-- {self.marker} -->\n"
        if page.count(begin) != 1:
            raise NotQuotedError(f"{begin.strip()} stands {page.count(begin)} times in the document, not once")
        start = page.index(begin) + len(begin)
        end = page.find("<!-- end -->", start)
        if end < 0:
            raise NotQuotedError(f"nothing ends what {begin.strip()} begins: <!-- end --> was expected")
        return start, end

    def _part(self, line: str) -> str:
        return line if self.columns is None else "|".join(line.split("|")[: self.columns + 1])


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """A command of a console block; all of its output is compared.

    Attributes:
      document: its path from the root.
      command: the command line after the prompt.
      sources: what runs it: its figures are `{"output": text}`.
    """

    document: str
    command: str
    sources: tuple[str, ...]

    @property
    def title(self) -> str:
        """Title in reports."""
        return f"{self.document}: $ {self.command}"

    def drift(self, page: str, made: list[Mapping[str, Any]]) -> list[str]:
        """Differences in the output, by lines."""
        found = [shown for shown in shown_in(page) if shown.command == self.command]
        if len(found) != 1:
            return [f"`$ {self.command}` stands {len(found)} times in the console blocks of the document, not once"]
        problem = difference(found[0], made[0]["output"])
        return [] if problem is None else problem.splitlines()

    def rewritten(self, page: str, made: list[Mapping[str, Any]]) -> str:
        """The page as it is: where output is cut is for a person to say."""
        return page

    def span(self, page: str) -> tuple[int, int]:
        """Place of the command on the page.

        Raises:
          NotQuotedError: nowhere, or at several places.
        """
        if page.count(f"$ {self.command}\n") != 1:
            raise NotQuotedError(f"`$ {self.command}` does not stand once in the document")
        start = page.index(f"$ {self.command}\n")
        return start, start + len(self.command) + 2


AnyClaim = Claim | Table | Output
