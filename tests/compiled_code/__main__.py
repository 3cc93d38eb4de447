"""`python -m tests.compiled_code`: what the data plane compiles to for GPUs, without one; needs JAX's CUDA plugin."""

from __future__ import annotations

import os
import sys
import time

import click

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.compiled_code import cases, record, tables

GPUS = {"sm_90": cases.IMPLEMENTATIONS, "sm_80": ("pallas_triton", "triton")}
"""Implementations that are compiled for each GPU."""


def is_of(gpu: str, case: cases.Case) -> bool:
    """True if a program is compiled for that GPU."""
    return gpu == "sm_90" or (case.implementation in GPUS[gpu] and case.layout in (*cases.FEW, *cases.GROUPS))


def measured(gpu: str, only: str = "") -> dict[str, record.Record]:
    """Records by name, of programs whose name has `only` in it."""
    found = {}
    chosen = [case for case in cases.all_cases() if is_of(gpu, case) and only in case.name]
    for number, case in enumerate(chosen):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{gpu} {number}/{len(chosen)} {case.name}", end="", file=sys.stderr, flush=True)
        found[case.name] = record.record_of(case, gpu)
    return found


@click.command()
@click.option("--only", default="", metavar="TEXT", help="Programs whose name has this in it: printed, not written.")
@click.option("--check", is_flag=True, help="Compare with what is recorded, and write nothing.")
def main(only: str, check: bool) -> None:
    """Compiles every operation of the data plane for sm_90 and sm_80 and writes what it found."""
    started = time.perf_counter()
    found = {gpu: measured(gpu, only) for gpu in GPUS}
    wrong = tables.all_problems(found, only)
    for line in wrong:
        click.echo(line)
    if only:
        for gpu, rows in found.items():
            for name, row in rows.items():
                click.echo(f"{gpu} {name}: {record.kept(row)}")
    elif check:
        wrong += tables.differences(record.load()[1], found)
        click.echo("\n".join(wrong) or "as recorded")
    else:
        record.save(found)
        tables.write(found)
    click.echo(f"{sum(map(len, found.values()))} programs in {time.perf_counter() - started:.0f} s")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
