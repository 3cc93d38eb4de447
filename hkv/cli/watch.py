"""`hkv watch`: an engine by itself, under random traffic and every invariant."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import click

from hkv.cli.html import broken_case, html_field, write_page
from hkv.cli.options import TrafficOptions, check_timeout, command_of, dialect_option, seeds_option, timeout_option
from hkv.cli.output_option import Reported, talks, write_json
from hkv.cli.progress import interruption, progress_bar
from hkv.cli.shrink import print_broken
from hkv.contract.answer import EngineFactory
from hkv.contract.options import argument, group, option
from hkv.oracle.broken_invariant import FoundTraffic, Watching
from hkv.oracle.engines import engine_factory
from hkv.oracle.history import Engines, history
from hkv.oracle.record import features_of
from hkv.page.live import MOST, Live


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WatchOptions(Reported):
    engine: str = argument(metavar="ENGINE")
    dialect: str = dialect_option()
    seeds: int = seeds_option(20)
    traffic: TrafficOptions = group(TrafficOptions)
    html: str | None = html_field("every block up to each broken invariant")
    serve: str | None = option(
        *(None, "--serve"),
        metavar="HOST:PORT",
        help="Serve a page of what is going on, on an address of this machine; port 0 for any. Ends when interrupted.",
    )
    timeout: float = timeout_option()


@command_of("watch", _WatchOptions)
def command(given: _WatchOptions) -> int:
    """Drive ENGINE through random traffic and judge it by the invariants of such caches, with no other engine.

    For engines whose rules are their own: other hits, another order of blocks, other keys. What ENGINE says that it
    lacks (docs/checking-your-engine.md) is not judged, and the last lines say so. Stops at the first broken invariant
    of each feature.

    Exit status: 0 no invariant is broken, 1 some, 2 unusable input.

    Example: hkv watch examples/wrong_engine.py:WrongEngine --kinds full_attention --max-groups 1 --version 1
    """
    engine, seeds, traffic, json_path = given.engine, given.seeds, given.traffic, given.json_path
    check_timeout(engine)
    only = traffic.restriction.under(given.dialect)
    factory = engine_factory(engine, given.timeout)
    watching = Watching(factory, only, traffic.version, traffic.steps)
    chosen = tuple(traffic.features) or features_of(only, traffic.version)
    found: list[FoundTraffic] = []

    def tell() -> None:
        if talks(json_path, given.html):
            _print(engine, chosen, seeds, watching, found)
        write_json(json_path, _document(engine, watching, found))

    def shown() -> dict[str, Any]:
        return _live(f"hkv watch: {engine}", watching, list(found), ((engine, factory),))

    with contextlib.ExitStack() as stack:
        live = Live(given.serve, f"hkv watch: {engine}", shown) if given.serve is not None else None
        if live is not None:
            stack.enter_context(live)
        with interruption().saying(tell), progress_bar("watching", len(chosen) * seeds) as advance:
            for feature in chosen:
                for seed in range(traffic.first_seed, traffic.first_seed + seeds):
                    broken = watching.seed(feature, seed)
                    advance()
                    if broken is not None:
                        found.append(broken)
                        break
        _finish(given, watching, found, factory, tell)
        if live is not None:
            live.wait()
    return bool(found)


def _finish(
    given: _WatchOptions,
    watching: Watching,
    found: list[FoundTraffic],
    factory: EngineFactory,
    tell: Callable[[], None],
) -> None:
    """Tells the result, and writes the page of what was found."""
    watching.require_some()
    tell()
    if given.html is not None:
        cases = [broken_case(each, ((given.engine, factory),)) for each in found]
        write_page(given.html, f"hkv watch: {given.engine}", cases)


def _live(title: str, watching: Watching, found: list[FoundTraffic], engines: Engines) -> dict[str, Any]:
    """Data of a page of what was found so far, and of the traffic that goes on."""
    cases = [broken_case(each, engines) for each in found]
    if watching.current is not None:
        feature, seed, version, header, operations = watching.current
        name = f"now: {feature} seed {seed} version {version}"
        whole = len(operations)
        said = f"the first {MOST:,} operations of {whole:,}" if whole > MOST else f"{whole:,} operations so far"
        cases.append(history(name, header, operations[:MOST], engines, headline=said, explained=False))
    return {"title": title, "cases": cases}


def _print(engine: str, features: tuple[str, ...], seeds: int, watching: Watching, found: list[FoundTraffic]) -> None:
    for each in found:
        broken = each.broken
        click.echo(f"{each.feature} seed {each.seed} version {each.version}: line {broken.line}: {broken.operation}")
        print_broken(each.header, each.operations, broken)
    said = f"{len(found)} broken" if found else "no invariant is broken"
    left_out = f", {watching.not_implemented} of them not implemented ({watching.reason})" if watching.reason else ""
    extent = f"{len(features)} features, {seeds} seeds each{left_out}, {watching.performed:,} operations"
    click.echo(f"{engine}: {said} in {extent}")
    for name, meaning in watching.lacks.items():
        click.echo(f"not judged, as the engine lacks it: {name} ({meaning})")
    if watching.not_asked:
        click.echo(f"invariants not asked for that: {', '.join(watching.not_asked)}")


def _document(engine: str, watching: Watching, found: list[FoundTraffic]) -> dict[str, Any]:
    return {
        "engine": engine,
        "holds": not found,
        "seeds": watching.seeds,
        "not_implemented": watching.not_implemented,
        "operations": watching.performed,
        "lacks": watching.lacks,
        "not_asked": watching.not_asked,
        "broken": [
            {"feature": each.feature, "seed": each.seed, "version": each.version, **dataclasses.asdict(each.broken)}
            for each in found
        ],
    }
