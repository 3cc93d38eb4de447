"""`hkv diff`: two engines through the same random traffic."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import click

from hkv.cli.bugs_option import bugs_of, bugs_option, refuse_bugs
from hkv.cli.engine_options import (
    FEATURE_NAMES,
    FORMS,
    check_timeout,
    dialect_option,
    ids_option,
    only_of,
    only_options,
    timeout_option,
)
from hkv.cli.failing_case import print_case, print_log
from hkv.cli.interruption import interruption
from hkv.cli.json_output import json_option, write_json
from hkv.cli.output_option import OutputFolder
from hkv.cli.progress import progress_bar
from hkv.cli.shrink import shrink_with_bar
from hkv.dialects import registry
from hkv.errors import ConfigError, UnsupportedConfigError
from hkv.limits import MAX_COUNT, MAX_SEED
from hkv.oracle.broken_invariant import Broken, first_broken
from hkv.oracle.check import describe
from hkv.oracle.engine import EngineFactory
from hkv.oracle.engines import built_in, engine_factory
from hkv.oracle.engines.process import PREFIX
from hkv.oracle.implemented import flags_for
from hkv.oracle.log_file import write_log
from hkv.oracle.record import Disagreement, Only, Recording, differ, draw
from hkv.oracle.shrink import Case, Shrinker


@click.command("diff")
@click.option(
    "--engines",
    help=f"The engine in doubt, then the one that counts, each one of: {FORMS}.  [default: numpy,vllm; under RTP-LLM's "
    "rules jax,numpy]",
)
@dialect_option
@click.option(
    "--seeds", default=50, show_default=True, type=click.IntRange(1, MAX_COUNT), help="How many seeds a feature."
)
@click.option("--first-seed", default=0, show_default=True, type=click.IntRange(0, MAX_SEED), help="The first of them.")
@click.option(
    "--feature", "features", multiple=True, type=click.Choice(FEATURE_NAMES), help="Only this feature; repeatable."
)
@only_options
@click.option("--version", type=click.IntRange(1, 2), help="Version of the log format. [default: both in turn]")
@click.option(
    "--steps", default=16, show_default=True, type=click.IntRange(1, MAX_COUNT), help="Scheduling steps a seed."
)
@ids_option
@bugs_option
@click.option("--shrink/--no-shrink", default=True, show_default=True, help="Make the failing case small.")
@click.option("--save", metavar="DIR", type=OutputFolder(), help="Folder for the log of a difference.")
@timeout_option
@json_option
@click.pass_context
def command(context: click.Context, engines: str | None, timeout: float, json_path: str | None, **options: Any) -> None:
    """Drive two engines through the same random traffic and compare every answer, the whole state after each step.

    Stops at the first difference of each feature, makes the case small, names the first invariant that the engine in
    doubt breaks on it, and saves the log up to it, with the answers of the second engine, for `hkv check`. Seeds whose
    configuration an engine says it does not implement are counted and left out.

    Exit status: 0 no difference, 1 some, 2 unusable input.

    \b
    Example:
      hkv diff --engines 'cmd:./my-engine --fast,numpy' --seeds 500 --feature eagle --save differences
      hkv diff --engines jax,numpy --dialect rtp-llm/hybrid --seeds 500
    """
    dialect = options["dialect"]
    rules = registry.dialect_of(dialect)
    tested, right = _engines(engines or ",".join(rules.default_pair))
    check_timeout(tested, right)
    factories = engine_factory(tested, timeout), engine_factory(right, timeout)
    only = only_of(options["kinds"], options["max_groups"], dialect)
    options["bugs"] = bugs_of(options["bugs"], "manager")
    refuse_bugs(options["bugs"], rules)
    options["versions"] = (options["version"],) if options["version"] else rules.versions
    chosen, seeds = options["features"] or rules.features(dialect), options["seeds"]
    for feature in chosen:
        draw(feature, 0, options["versions"][0], only)  # one that the dialect does not have says so
    for factory in factories:
        _check_installed(factory, only, chosen, options["versions"][0])
    run = _Run(factories, only, options, json_path != "-")
    names = tested, right
    with interruption().saying(lambda: _say(names, run, f"stopped after {run.compared} seeds", json_path)):
        try:
            with progress_bar("comparing", len(chosen) * seeds) as advance:
                for feature in chosen:
                    for seed in range(options["first_seed"], options["first_seed"] + seeds):
                        parted = run.seed(feature, seed)
                        advance()
                        if parted is not None:
                            break
        except BaseException:
            run.report(shrink=False)  # what was found is said, whatever ends the search
            raise
        run.report(options["shrink"])
    _finish(context, names, run, chosen, seeds, json_path)


def _finish(
    context: click.Context,
    names: tuple[str, str],
    run: _Run,
    chosen: Sequence[str],
    seeds: int,
    json_path: str | None,
) -> None:
    flags = run.flags() if run.unsupported > run.compared else ""
    hint = f"configurations that are can be drawn with {flags}" if flags else ""
    if run.unsupported and not run.compared:
        expected = "one configuration at least that both engines implement"
        raise ConfigError("engines", run.reason, f"{expected}; {hint}" if hint else expected)
    _say(names, run, f"in {len(chosen)} features, {seeds} seeds each", json_path, hint)
    context.exit(1 if run.found else 0)


def _say(names: tuple[str, str], run: _Run, extent: str, json_path: str | None, hint: str = "") -> None:
    if json_path != "-":
        left_out = f", {run.unsupported} of them not implemented ({run.reason})" if run.unsupported else ""
        found = len(run.found)
        click.echo(
            f"{names[0]} and {names[1]}: {found or 'no'} difference{'s' * (found > 1)} "
            f"{extent}{left_out}, {run.operations:,} operations"
        )
        if hint:
            click.echo(f"most are not implemented; {hint}")
    result = {"engines": list(names), "operations": run.operations, "not_implemented": run.unsupported}
    write_json(json_path, {**result, "differences": run.found})


class _Run:
    """What happens to the seeds."""

    def __init__(
        self, factories: tuple[EngineFactory, EngineFactory], only: Only, options: dict[str, Any], talk: bool
    ) -> None:
        self._tested, self._right = factories
        self._only, self._options, self._talk = only, options, talk
        self.operations = self.unsupported = self.compared = 0
        self.reason = ""
        self.parted: dict[str, tuple[int, Disagreement]] = {}
        self.found: dict[str, Any] = {}

    def flags(self) -> str:
        """Options under which both engines implement what is drawn."""
        return flags_for(lambda header: (self._tested(header), self._right(header)), self._only.dialect)

    def version(self, seed: int) -> int:
        """Of the log format."""
        versions = self._options["versions"]
        return versions[seed % len(versions)]

    def seed(self, feature: str, seed: int) -> Disagreement | None:
        """Compares the engines on one seed."""
        try:
            recording, parted = differ(
                self._tested,
                self._right,
                feature,
                seed,
                self.version(seed),
                self._options["steps"],
                self._options["ids"],
                self._only,
                self._options["bugs"],
            )
        except UnsupportedConfigError as error:
            self.unsupported += 1
            self.reason = self.reason or str(error.value if error.argument == "header" else error)
            return None
        self.compared += 1
        self.operations += len(recording.operations)
        if parted is not None:
            self.parted[feature] = seed, parted
        return parted

    def report(self, shrink: bool) -> None:
        """Prints the differences, small if so wanted, and saves them.

        Raises:
          KeyboardInterrupt: shrinking was interrupted; every difference was reported, as small as it was by then.
        """
        interrupt: KeyboardInterrupt | None = None
        for feature, (seed, parted) in self.parted.items():
            recording = parted.recording
            case = Case(recording.header, tuple(recording.operations), tuple(recording.answers), parted.mismatch)
            shrinker = Shrinker(self._tested, self._right, self._options["ids"])
            if case.operations and shrink and interrupt is None:
                try:
                    case = shrink_with_bar(shrinker, case)
                except KeyboardInterrupt as pressed:
                    case, interrupt = shrinker.best or case, pressed
            self._report(case, recording, shrinker.problem, feature, seed)
        if interrupt is not None:
            raise interrupt

    def _report(self, case: Case, recording: Recording, problem: str | None, feature: str, seed: int) -> None:
        """Prints one difference and saves it."""
        whole, broken = len(recording.operations), self._broken(case, recording)
        if self._talk:
            click.echo(f"{feature} seed {seed} version {self.version(seed)}: {_where(case)}")
            print_case(case, whole, broken, problem)
        path = None
        if self._options["save"] is not None:
            path = pathlib.Path(self._options["save"]) / f"{feature}-{seed}-v{self.version(seed)}.jsonl"
            write_log(path, case.header, case.operations, case.answers)
            if self._talk:
                print_log(path)
        self.found[feature] = {
            "seed": seed,
            "version": self.version(seed),
            "line": len(case.operations) + 1,
            "operation": describe(case.operations[-1]) if case.operations else "header",
            "field": case.mismatch.field,
            "want": case.mismatch.want,
            "got": case.mismatch.got,
            "operations": len(case.operations),
            "operations_before_shrinking": whole,
            "invariant": broken.name if isinstance(broken, Broken) else None,
            "invariant_problem": broken.problem if isinstance(broken, Broken) else broken,
            **({} if problem is None else {"shrinking_problem": problem}),
            **({} if path is None else {"log": str(path)}),
        }

    def _broken(self, case: Case, parted: Any) -> Broken | str:
        if not case.operations:
            return "the engines disagree about the configuration itself"
        broken = first_broken(self._tested, case.header, case.operations)
        if isinstance(broken, Broken) or len(case.operations) == len(parted.operations):
            return broken
        whole = first_broken(self._tested, parted.header, parted.operations)
        return broken if isinstance(whole, str) else f"none on the small case; on the whole one: {whole.name}"


def _where(case: Case) -> str:
    return f"line {len(case.operations) + 1}: " + (describe(case.operations[-1]) if case.operations else "header")


def _check_installed(factory: EngineFactory, only: Only, features: Sequence[str], version: int) -> None:
    """An engine that is not there is no difference; one that does not implement the first configuration may be."""
    try:
        factory(draw(features[0], 0, version, only)[0])
    except UnsupportedConfigError:
        return


def _engines(text: str) -> tuple[str, str]:
    """The two names. A comma may also stand inside a command line."""
    for cut in (index for index, character in enumerate(text) if character == ","):
        names = text[:cut].strip(), text[cut + 1 :].strip()
        if all(_may_be_engine(name) for name in names):
            return names
    raise ConfigError("engines", text, f"two names, comma-separated, each one of {FORMS}")


def _may_be_engine(name: str) -> bool:
    return name.partition("@")[0] in built_in() or name.startswith(PREFIX) or (":" in name and "," not in name)
