"""`hkv watch`: an engine by itself, under random traffic and every invariant."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import click

from hkv.cli.html import html_field, write_page
from hkv.cli.options import (
    TrafficOptions,
    check_timeout,
    command_of,
    dialect_option,
    refuse_given,
    seeds_option,
    timeout_option,
)
from hkv.cli.output_option import OutputFolder, Reported, talks, write_json
from hkv.cli.progress import interruption, progress_bar
from hkv.cli.shrink import print_log, shrink_with_bar
from hkv.contract.answer import EngineFactory
from hkv.contract.options import argument, group, option
from hkv.limits import counted
from hkv.oracle.account import page_of, repeated, small, told, write_log_of
from hkv.oracle.broken_invariant import FoundTraffic, Watching
from hkv.oracle.engines import engine_factory
from hkv.oracle.history import Engines, history
from hkv.oracle.log_file import read_log
from hkv.oracle.record import features_of
from hkv.oracle.shrink import repaired
from hkv.page.live import MOST, Live


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WatchOptions(Reported):
    engine: str = argument(metavar="ENGINE")
    dialect: str = dialect_option()
    seeds: int = seeds_option(20)
    traffic: TrafficOptions = group(TrafficOptions)
    log: str | None = option(
        metavar="LOG", type=click.Path(), help="Drive ENGINE along the operations of a LOG instead of random traffic."
    )
    shrink: bool = option(True, "--shrink/--no-shrink", help="Make the failing case small.")
    save: str | None = option(metavar="DIR", type=OutputFolder(), help="Folder for the log of a broken invariant.")
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
    of each feature, and makes the case small; `hkv watch ENGINE --log LOG` repeats one that was saved.

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
    saved: dict[int, str] = {}
    if given.log is not None:
        drawn = ("dialect", "seeds", "first_seed", "features", "kinds", "max_groups", "version", "steps")
        refuse_given(drawn, "random traffic, without --log")
        chosen, seeds = (), 0
        log = read_log(given.log, lambda header: lambda operation: None)
        broken = watching.along(given.log, None, log.header, repaired(log.header, log.operations))
        found += [broken] if broken is not None else []

    def tell(interrupted: bool = True) -> None:
        extent = f"{counted(len(chosen), 'feature')}, {counted(seeds, 'seed')} each"
        if given.log is not None:
            extent = given.log
        elif interrupted:
            extent = f"the first {counted(watching.seeds, 'seed')}, until it was interrupted"
        if talks(json_path, given.html):
            _print(engine, extent, watching, found, saved)
        document = _document(engine, watching, found)
        write_json(json_path, {**document, "holds": None} if interrupted and not found else document)

    def shown() -> dict[str, Any]:
        return _live(f"hkv watch: {engine}", watching, list(found), ((engine, factory),))

    with contextlib.ExitStack() as stack:
        live = Live(given.serve, f"hkv watch: {engine}", shown) if given.serve is not None else None
        if live is not None:
            stack.enter_context(live)
        with interruption().saying(tell):
            with progress_bar("watching", len(chosen) * seeds) as advance:
                for feature in chosen:
                    for seed in range(traffic.first_seed, traffic.first_seed + seeds):
                        broken = watching.seed(feature, seed)
                        advance()
                        if broken is not None:
                            found.append(broken)
                            break
            _finish(given, watching, found, factory, saved)
        tell(interrupted=False)
        if live is not None:
            live.wait()
    return bool(found)


def _finish(
    given: _WatchOptions, watching: Watching, found: list[FoundTraffic], factory: EngineFactory, saved: dict[int, str]
) -> None:
    """Makes what was found small, saves it, and writes the page of it."""
    watching.require_some()
    for place, each in enumerate(found):
        if given.shrink:
            each = found[place] = small(factory, each, shrink_with_bar)
        if given.save is not None:
            seed = "small" if each.seed is None else f"{each.seed}-v{each.version}"
            saved[place] = str(pathlib.Path(given.save) / f"{pathlib.Path(each.feature).stem}-{seed}.jsonl")
            write_log_of(saved[place], factory, each)
    if given.html is not None:
        engines = ((given.engine, factory),)
        cases = [page_of(each, engines, saved.get(place, "")) for place, each in enumerate(found)]
        write_page(given.html, f"hkv watch: {given.engine}", cases)


def _live(title: str, watching: Watching, found: list[FoundTraffic], engines: Engines) -> dict[str, Any]:
    """Data of a page of what was found so far, and of the traffic that goes on."""
    cases = [page_of(each, engines) for each in found]
    if watching.current is not None:
        feature, seed, version, header, operations = watching.current
        name = f"now: {feature} seed {seed} version {version}"
        whole, so_far = len(operations), f"{counted(len(operations), 'operation')} so far"
        said = f"the first {MOST:,} operations of {whole:,}" if whole > MOST else so_far
        cases.append(history(name, header, operations[:MOST], engines, headline=said, explained=False))
    return {"title": title, "cases": cases}


def _print(engine: str, extent: str, watching: Watching, found: list[FoundTraffic], saved: Mapping[int, str]) -> None:
    for place, each in enumerate(found):
        click.echo("\n".join(told(each)))
        if place in saved:
            print_log(saved[place])
        click.echo(f"  again   {repeated(engine, each, saved.get(place, ''))}")
    said = f"{len(found)} broken" if found else "no invariant is broken"
    left_out = f", {watching.not_implemented} of them not implemented ({watching.reason})" if watching.reason else ""
    click.echo(f"{engine}: {said} in {extent}{left_out}, {counted(watching.performed, 'operation')}")
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
