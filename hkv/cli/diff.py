"""`hkv diff`: two engines through the same random traffic."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import click

from hkv.cli.html import difference_case, html_field, write_page
from hkv.cli.options import (
    FORMS,
    TrafficOptions,
    bugs_option,
    check_timeout,
    command_of,
    defaults,
    dialect_option,
    ids_option,
    names_of,
    seeds_option,
    timeout_option,
)
from hkv.cli.output_option import OutputFolder, Reported, talks, write_json
from hkv.cli.progress import interruption, progress_bar
from hkv.cli.shrink import print_found, print_log, shrink_with_bar
from hkv.contract import registry
from hkv.contract.options import group, option
from hkv.errors import ConfigError
from hkv.limits import counted
from hkv.oracle.comparison import Comparison, compare_in_cluster
from hkv.oracle.engines import PREFIX, built_in
from hkv.oracle.found_difference import DiffResult, FoundDifference


@dataclasses.dataclass(frozen=True, kw_only=True)
class _DiffOptions(Reported):
    engines: str | None = option(
        help=f"The engine in doubt and the one that counts, each one of: {FORMS}. Beside one of HKV's own, the other "
        "is in doubt, whichever comes first; --definition says otherwise.  "
        f"[default: {defaults(lambda dialect: ','.join(dialect.default_pair))}]"
    )
    definition: str | None = option(
        metavar="ENGINE", help="The one of --engines that is right by declaration; the other is in doubt."
    )
    dialect: str = dialect_option()
    seeds: int = seeds_option(50)
    traffic: TrafficOptions = group(TrafficOptions)
    ids: str = ids_option()
    bugs: Sequence[str] = bugs_option()
    known: Sequence[str] = option(
        (),
        "--known",
        multiple=True,
        metavar="NAMES",
        help="Known upstream defects that the engine in doubt has: seeds that differ in nothing else are counted.",
    )
    shrink: bool = option(True, "--shrink/--no-shrink", help="Make the failing case small.")
    save: str | None = option(metavar="DIR", type=OutputFolder(), help="Folder for the log of a difference.")
    html: str | None = html_field("every block on both engines, of each difference")
    timeout: float = timeout_option()
    ray: str | None = option(
        metavar="ADDRESS", help="Have a Ray cluster compare: auto, local, HOST:PORT.  [default: this process]"
    )


@command_of("diff", _DiffOptions)
def command(given: _DiffOptions) -> int:
    """Drive two engines through the same random traffic and compare every answer, the whole state after each step.

    Stops at the first difference of each feature that is not --known, makes the case small, names the first invariant
    that each engine breaks on it, and saves the log up to it, with the answers of the engine that counts, for
    `hkv check`. Seeds whose configuration an engine says it does not implement are counted and left out.

    Exit status: 0 no difference, 1 some, 2 unusable input.

    \b
    Example:
      hkv diff --engines 'cmd:./my-engine --fast,numpy' --seeds 500 --feature eagle --save differences
      hkv diff --engines jax,numpy --dialect rtp-llm/hybrid --seeds 500
    """
    pair = _engines(given.engines or ",".join(registry.dialect_of(given.dialect).default_pair))
    check_timeout(*pair)
    traffic, bugs = given.traffic, names_of(given.bugs)
    only = traffic.restriction.under(given.dialect)
    own = (names_of(given.known), given.definition)
    arguments = (pair, only, traffic.version, traffic.steps, given.ids, bugs, given.timeout, *own)
    comparison = Comparison(*arguments)
    chosen = tuple(traffic.features) or comparison.features
    each = range(traffic.first_seed, traffic.first_seed + given.seeds)
    comparison.require(chosen)
    report = _Report(comparison, given.save, talks(given.json_path, given.html))

    def stopped() -> None:
        so_far = comparison.so_far(report.found)
        _say(so_far, f"stopped after {counted(so_far.seeds, 'seed')}", report.documents, given)

    with interruption().saying(stopped):
        try:
            with progress_bar("comparing", len(chosen) * given.seeds) as advance:
                if given.ray is not None:
                    compare_in_cluster(comparison, arguments, chosen, each, given.ray, advance)
                for feature in chosen if given.ray is None else ():
                    for seed in each:
                        parted = comparison.seed(feature, seed)
                        advance()
                        if parted:
                            break
        except BaseException:
            report.tell(shrink=False, hurried=True)  # what was found is said, whatever ends the search
            raise
        report.tell(given.shrink)
    result = comparison.result(report.found)
    if given.html is not None:
        cases = [difference_case(found, comparison.factories(found), given.ids) for found in report.found]
        write_page(given.html, f"hkv diff: {' and '.join(comparison.engines)}", cases)
    _say(result, f"in {counted(len(chosen), 'feature')}, {counted(given.seeds, 'seed')} each", report.documents, given)
    return not result.agrees


def _say(result: DiffResult, extent: str, differences: dict[str, Any], given: _DiffOptions) -> None:
    if talks(given.json_path, given.html):
        left_out = f", {result.not_implemented} of them not implemented ({result.reason})"
        found = len(result.found)
        click.echo(
            f"{' and '.join(result.engines)}: {counted(found, 'difference') if found else 'no difference'} "
            f"{extent}{left_out if result.not_implemented else ''}, {counted(result.operations, 'operation')}"
        )
        for name, seeds in result.known.items():
            behaviour = registry.dialect_of(given.dialect).bugs[name].behaviour
            differ = f"{counted(seeds, 'seed')} differ{'s' * (seeds == 1)}"
            click.echo(f"known defect: {differ} in nothing but {name}: {behaviour}")
        if result.failed:
            click.echo(f"seeds that ended where both engines failed: {result.failed} ({result.failure})")
        for name, meaning in result.not_compared.items():
            click.echo(f"not compared, as an engine lacks it: {name} ({meaning})")
        if result.hint:
            click.echo(f"most are not implemented; {result.hint}")
    document = {
        "engines": list(result.engines),
        "operations": result.operations,
        "not_implemented": result.not_implemented,
        "failed": result.failed,
        "differences": differences,
        "not_compared": dict(result.not_compared),
        "known": dict(result.known),
    }
    write_json(given.json_path, document)


class _Report:
    """Prints differences and saves them."""

    def __init__(self, comparison: Comparison, folder: str | None, talk: bool) -> None:
        self._comparison, self._folder, self._talk = comparison, folder, talk
        self.found: list[FoundDifference] = []
        self.documents: dict[str, Any] = {}

    def tell(self, shrink: bool, hurried: bool = False) -> None:
        """Prints the differences, small if so wanted, and saves them."""
        for found in self._comparison.differences(shrink, shrink_with_bar, hurried):
            name = f"{found.feature} seed {found.seed} version {found.version}"
            if self._talk:
                click.echo(f"{name}: {found.headline}")
                print_found(found)
            document = found.record()
            if self._folder is not None:
                path = pathlib.Path(self._folder) / f"{found.feature}-{found.seed}-v{found.version}.jsonl"
                found.write(path)
                document["log"] = str(path)
                if self._talk:
                    print_log(path)
            self.found.append(found)
            self.documents[found.feature] = document


def _engines(text: str) -> tuple[str, str]:
    """The two names. A comma may also stand inside a command line."""
    for cut in (index for index, character in enumerate(text) if character == ","):
        names = text[:cut].strip(), text[cut + 1 :].strip()
        if all(_may_be_engine(name) for name in names):
            return names
    raise ConfigError("engines", text, f"two names, comma-separated, each one of {FORMS}")


def _may_be_engine(name: str) -> bool:
    return name.partition("@")[0] in built_in() or name.startswith(PREFIX) or (":" in name and "," not in name)
