"""Makes the figures that README and docs/ quote again, and fails where a document says something else.

python benchmarks/claims.py                                     # what can be made here
python benchmarks/claims.py --cost seconds                      # what takes seconds
python benchmarks/claims.py --only hits                         # one document, or one source of figures
python benchmarks/claims.py --vllm-python VLLM/bin/python --trace conversation_trace.jsonl --timings
python benchmarks/claims.py --only dialects --write             # puts exact figures into the documents

Counts are compared exactly, as far as a document writes them out. Times, and ratios of times, are compared with the
published spread, and only with `--timings`: they want cores that nothing else uses. What could not be made is listed
with what it needs; the exit status is about what was: 0 if all of it agrees, 1 if any does not.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import click

from benchmarks.quoted.claim import AnyClaim
from benchmarks.quoted.documents import CLAIMS
from benchmarks.quoted.source import ROOT, Cost, Setting, Source, SourceError
from benchmarks.quoted.sources import SOURCES


def chosen(only: Sequence[str]) -> list[AnyClaim]:
    """Claims of which the document or a source is named.

    Raises:
      UsageError: a name that is no part of any.
    """
    if not only:
        return list(CLAIMS)
    for name in only:
        if not any(_is_named(claim, name) for claim in CLAIMS):
            names = ", ".join(sorted({claim.document for claim in CLAIMS} | set(SOURCES)))
            raise click.UsageError(f"--only {name}: a part of one of these was expected: {names}")
    return [claim for claim in CLAIMS if any(_is_named(claim, name) for name in only)]


def _is_named(claim: AnyClaim, name: str) -> bool:
    return name.lower() in claim.document.lower() or name in claim.sources


class Run:
    """Sources that were run, each once, and what came of claims.

    Attributes:
      made: figures by source.
      failed: what went wrong, by source.
      drifts: problems by claim, for those that were remade.
      not_run: what is needed, by claim, for those that were not.
    """

    def __init__(self, setting: Setting, sources: Mapping[str, Source] | None = None) -> None:
        self._setting, self._sources = setting, SOURCES if sources is None else sources
        self.made: dict[str, Mapping[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.drifts: dict[AnyClaim, list[str]] = {}
        self.not_run: dict[AnyClaim, list[str]] = {}

    def claim(self, claim: AnyClaim, page: str) -> None:
        """Makes a claim's figures and compares them with the page."""
        needs = [need for name in claim.sources for need in self._sources[name].missing(self._setting)]
        if needs:
            self.not_run[claim] = sorted(set(needs))
            return
        problems = [self.failed[name] for name in claim.sources if not self._make(name)]
        self.drifts[claim] = problems or claim.drift(page, self._figures(claim))

    def rewritten(self, claim: AnyClaim, page: str) -> str:
        """The page with what was made for a claim, if it was made."""
        remade = claim in self.drifts and all(name in self.made for name in claim.sources)
        return claim.rewritten(page, self._figures(claim)) if remade else page

    def _figures(self, claim: AnyClaim) -> list[Mapping[str, Any]]:
        return [self.made[name] for name in claim.sources]

    def _make(self, name: str) -> bool:
        if name not in self.made and name not in self.failed:
            click.echo(f"making {name}: {self._sources[name].command}", err=True)
            try:
                self.made[name] = self._sources[name].figures(self._setting)
            except SourceError as error:
                self.failed[name] = str(error)
        return name in self.made


@click.command(help=__doc__)
@click.option("--only", multiple=True, metavar="NAME", help="Part of a document's path, or a source; repeatable.")
@click.option("--write", is_flag=True, help="Put exact figures that differ into the documents.")
@click.option("--list", "listed", is_flag=True, help="Name the claims and what makes them; make none.")
@click.option("--cost", default="hours", type=click.Choice([cost.name.lower() for cost in Cost]), show_default=True)
@click.option("--vllm-python", metavar="PATH", type=click.Path(exists=True, dir_okay=False), help="With vLLM 0.33.0.")
@click.option("--trace", metavar="PATH", type=click.Path(exists=True, dir_okay=False), help="Mooncake's conversations.")
@click.option("--vllm-tests", metavar="PATH", type=click.Path(exists=True, file_okay=False), help="vLLM's own tests.")
@click.option("--timings", is_flag=True, help="Make what is timed as well.")
@click.pass_context
def main(context: click.Context, only: tuple[str, ...], write: bool, listed: bool, cost: str, **options: Any) -> None:
    given = (options["vllm_python"], options["trace"], options["timings"], Cost[cost.upper()], options["vllm_tests"])
    setting = Setting(*given)
    claims = chosen(only)
    if listed:
        for claim in claims:
            click.echo(claim.title)
            for name in claim.sources:
                source = SOURCES[name]
                click.echo(f"  {source.cost.name.lower()}{', timed' * source.timed}: {source.command}")
        return
    run = Run(setting)
    for claim in claims:
        run.claim(claim, (ROOT / claim.document).read_text())
    if write:
        _write(run, claims)
    _report(run)
    context.exit(1 if any(run.drifts.values()) else 0)


def _write(run: Run, claims: Sequence[AnyClaim]) -> None:
    """Puts what was made into the documents, then judges them again."""
    for claim in claims:
        if run.drifts.get(claim):
            path = ROOT / claim.document
            page = path.read_text()
            path.write_text(run.rewritten(claim, page))
            run.claim(claim, path.read_text())


def _report(run: Run) -> None:
    """Prints what differs, what was not made, and the numbers of both."""
    for claim, problems in run.drifts.items():
        if problems:
            click.echo(f"DRIFTED {claim.title}")
            for problem in problems:
                click.echo(f"  {problem}")
    left_out = collections.Counter(", ".join(needs) for needs in run.not_run.values())
    for needs, count in left_out.items():
        click.echo(f"not made: {count} claims, which need {needs}")
    drifted = sum(map(bool, run.drifts.values()))
    click.echo(
        f"{len(run.drifts)} claims made again, {drifted} of them drifted; {len(run.not_run)} not made, of "
        f"{len(run.drifts) + len(run.not_run)}"
    )


if __name__ == "__main__":
    main()
