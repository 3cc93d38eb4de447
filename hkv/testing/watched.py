"""An engine under every invariant of its dialect, and random traffic through it."""

from __future__ import annotations

import inspect
import os
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.answer import EngineFactory
from hkv.oracle.account import page_of, repeated, small, told, write_log_of
from hkv.oracle.broken_invariant import FoundTraffic, Watching
from hkv.oracle.log_file import write_atomically
from hkv.oracle.record import Only, features_of
from hkv.page import page


class Watch:
    """Performs operations on an engine, and asks every invariant of its dialect after each.

    Args:
      engine: the engine.
      header: its configuration, as a log's first line has it; names the dialect.

    Raises:
      UnsupportedConfigError: the dialect has no invariants.
    """

    def __init__(self, engine: Any, header: Any) -> None:
        self._watch = registry.dialect_of(header.dialect).watch(engine, header)

    def perform(self, operation: Any) -> Any:
        """Performs one operation and returns the engine's answer.

        Raises:
          InvariantError: an invariant does not hold after it.
        """
        return self._watch.perform(operation)


def run_watched(
    factory: EngineFactory,
    *,
    dialect: str = registry.DEFAULT,
    features: Sequence[str] = (),
    seeds: int = 5,
    first_seed: int = 0,
    kinds: Iterable[str] = (),
    max_groups: int | None = None,
    version: int | None = None,
    steps: int = 16,
    save: str | os.PathLike[str] | None = None,
) -> int:
    """Drives an engine through random traffic under every invariant of its dialect.

    Seeds whose configuration the engine says it does not implement are left out. Traffic that breaks an invariant is
    made small; the error tells it, and names a log of it, a page, and the command that repeats it.

    Args:
      factory: makes an empty engine of a header.
      dialect: name of the dialect, as headers give it.
      features: features of the traffic; none for every feature of the dialect.
      seeds: number of seeds a feature.
      first_seed: the first of them.
      kinds: only groups of these kinds; none for all.
      max_groups: most groups; None for any number.
      version: of the log format; None for the newest.
      steps: scheduling steps a seed.
      save: folder for the log and the page; None for one in the folder of temporary files.

    Returns:
      Operations performed.

    Raises:
      InvariantError: an invariant does not hold; names it and the operation.
      ConfigError: the engine implements none of the configurations.
    """
    rules, only = registry.dialect_of(dialect), Only(frozenset(kinds), max_groups, dialect)
    watching = Watching(factory, only, rules.drawn_versions(only.kinds)[-1] if version is None else version, steps)
    for feature in tuple(features) or features_of(only, version):
        for seed in range(first_seed, first_seed + seeds):
            found = watching.seed(feature, seed)
            if found is not None:
                raise accounted(factory, small(factory, found), save)
    watching.require_some()
    return watching.performed


def accounted(factory: EngineFactory, found: FoundTraffic, save: str | os.PathLike[str] | None = None) -> Exception:
    """The error that is to be raised of traffic under which an engine broke an invariant, with the whole account."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="hkv-") if save is None else save)
    log = folder / f"{found.name.replace(' ', '-')}.jsonl"
    name = _name(factory)
    write_log_of(log, factory, found)
    cases = [page_of(found, ((name, factory),), str(log))]
    write_atomically(log.with_suffix(".html"), page(name, {"title": name, "cases": cases}))
    ends = [f"  log     {log}", f"  page    {log.with_suffix('.html')}", f"  again   {repeated(name, found, str(log))}"]
    found.error.add_note("\n".join([*told(found), *ends]))
    return found.error.with_traceback(None)


def _name(factory: EngineFactory) -> str:
    """The engine as commands name it."""
    try:
        return f"{inspect.getsourcefile(factory)}:{factory.__qualname__}"  # pyright: ignore[reportFunctionMemberAccess]
    except TypeError:
        return repr(factory)
