"""Output of a failing case."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import click

from hkv.contract import registry
from hkv.contract.case import Case
from hkv.contract.log import describe
from hkv.oracle.broken_invariant import Broken

MOST = 20
"""Operations of a case that are printed; of a longer one, the last."""


def print_case(
    case: Case,
    whole: int,
    broken: Broken | str,
    problem: str | None = None,
    engines: tuple[str, str] | None = None,
) -> None:
    """Prints where the engines differ, which invariant is broken, and the operations that lead there.

    `whole` is how many operations there were before shrinking, `problem` what ended that too early. Of two engines, the
    first is in doubt; they are not named where they are None.
    """
    mismatch = case.mismatch
    line, operation = len(case.answers) + 1, describe(case.differing[-1]) if case.operations else "header"
    doubted, counts = ("", "") if engines is None else (f"  ({name})" for name in engines)
    click.echo(f"  line {line}: {operation}: {mismatch.field}")
    click.echo(f"    wanted {mismatch.want}{counts}\n    got    {mismatch.got}{doubted}")
    print_broken(case.header, case.operations, broken, whole, len(case.answers))
    if problem is not None:
        click.echo(f"  shrinking ended early, this is the smallest case up to there: {_one_line(problem)}")


def print_broken(
    header: Any, operations: Sequence[Any], broken: Broken | str, whole: int = 0, differing: int | None = None
) -> None:
    """Prints an invariant that is broken, and the operations that lead there, of `whole` before shrinking.

    After the first `differing` of them, the engine in doubt goes on by itself.
    """
    if isinstance(broken, Broken):
        click.echo(f"  broken invariant: {broken.name}")
        click.echo(f"    line {broken.line}, {broken.problem}")
        click.echo(f"    promised: {broken.promise}")
    else:
        click.echo(f"  broken invariant: {broken}")
    if operations:
        cache = registry.dialect_of(header.dialect).summary(header)
        shrunk = f", shrunk from {whole}" if whole > len(operations) else ""
        click.echo(f"  {len(operations)} operations{shrunk}, on {cache}:")
        first = max(0, len(operations) - MOST)
        if first:
            click.echo(f"    ... {first} more before these")
        for index in range(first, len(operations)):
            click.echo(f"    {index + 2:>4}: {_plain(describe(operations[index]))}")
            if differing is not None and index + 1 == differing < len(operations):
                click.echo("          from here on the engine in doubt follows its own answers")


def print_other(engines: tuple[str, str], broken: Broken | str, other: Broken | str) -> None:
    """Prints what the invariants say of the engine that counts, where either breaks one; arguments as of
    `FoundDifference`."""
    if isinstance(other, Broken):
        click.echo(f"  {engines[1]} breaks {other.name}, line {other.line}, {other.problem}")
    elif isinstance(broken, Broken):
        click.echo(f"  {engines[1]}: {other}")


def print_log(path: pathlib.Path | str) -> None:
    """Prints where a case was saved."""
    click.echo(f"  log     {path}")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _plain(text: str) -> str:
    """Text of an operation, without the fields of an `allocate` that are at their plainest."""
    words = "hit=0 lookahead=0 external=0 delay=false must_fit=false reserved=0 in_flight=0 shared_prefix=0"
    return " ".join(word for word in text.split(" ") if word not in words.split())
