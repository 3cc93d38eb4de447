"""`hkv check-kernel`: a kernel over paged caches held to the definition, byte for byte."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from rich.markup import escape

from hkv import files
from hkv.cli.options import command_of, is_given, refuse_given
from hkv.cli.output_option import OutputPath, Reported, console, table, talks, write_json, write_output
from hkv.cli.progress import progress_bar
from hkv.contract.options import COUNT, SECONDS, SEED, argument, option
from hkv.errors import ConfigError
from hkv.foreign import is_library
from hkv.limits import counted
from hkv.testing.kernels.call import ARGUMENTS
from hkv.testing.kernels.cases import DTYPES, FEATURES, FORMATS, OPERATIONS, Supports
from hkv.testing.kernels.judge import Failure, Kept, Verdict, case_bytes, check, read_case, repeat
from hkv.testing.kernels.placement import CONTENTS, FAMILIES
from hkv.testing.kernels.targets import Performing, Target, not_asked_names, target_of
from hkv.testing.kernels.watching import watched

CASE_FILE = "kernel-case.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _CheckKernelOptions(Reported):
    target: str | None = argument(metavar="[TARGET]", required=False)
    operation: str | None = option(type=click.Choice(OPERATIONS), help="What it does.  [default: as it declares]")
    draws: int = option(1000, type=COUNT, help="Cases that TARGET supports.")
    seed: int = option(0, type=SEED, help="Of the draws.")
    supports: tuple[str, ...] = option(
        (), metavar="FIELD=VALUES", help="A property of TARGET, in place of what it declares; repeatable."
    )
    device: str = option("", help="Device of torch tensors, such as cuda.")
    timeout: float = option(60.0, type=SECONDS, metavar="SECONDS", help="Time that one case may take.")
    case: str | None = option(metavar="F", type=click.Path(), help="Repeat the case in the file F alone.")
    output: str | None = option(
        *(None, "-o", "--output"), metavar="F", type=OutputPath(), help=f"Where to save a failing case.  [{CASE_FILE}]"
    )
    names: bool = option(False, "--list", help="Only list operations, arguments, fields, layouts and features.")


@command_of("check-kernel", _CheckKernelOptions)
def command(given: _CheckKernelOptions) -> int | None:
    """Hold a kernel to the definition of its operation, byte for byte.

    TARGET is MODULE:FUNCTION or FILE.py:FUNCTION, over torch tensors, JAX or NumPy arrays, or LIBRARY.so:SYMBOL, a C
    function over DLTensors. It is given what its parameters' names ask for, and drawn layouts, element types, block
    tables, slots and lengths; poison lies around all it may touch. What it does not support it says itself, or
    --supports does; the rest is counted as not asked. A failure is made small, told, and saved.

    Exit status: 0 every byte is right, 1 some are not, 2 unusable input.

    \b
    Example:
      hkv check-kernel my_kernels.py:reshape_and_cache --operation write
      hkv check-kernel ./libkernels.so:write --operation write --supports dtypes=bfloat16 --supports 'lacks=far blocks'
    """
    if given.names:
        _print_names()
        write_json(given.json_path, _names())
        return None
    said = None if given.case is None else read_case(files.read_whole(given.case), given.case)
    if said is not None:
        refuse_given(("draws", "seed", "operation"), "none: the case has its own")
    if (name := given.target or (said and said.target)) is None:
        raise ConfigError("TARGET", "", "a kernel, or a case of one with --case")
    with progress_bar("checking", 1 if said else given.draws) as advance:
        if is_library(name.rpartition(":")[0]):  # its functions have a process already
            outcome = _outcome(lambda target, case: None, advance, lambda failure: None, given, name, said)
        else:
            outcome = watched(name, given.timeout, _outcome, given, name, said, advance=advance)
    return _report(given, *outcome)


def _outcome(
    performing: Performing,
    advance: Callable[[], None],
    failing: Callable[[Failure], None],
    given: _CheckKernelOptions,
    name: str,
    said: Kept | None,
) -> tuple[Target, Verdict]:
    """The kernel, and what is to be said of it; it runs in a process of its own."""
    target = _target(given, name, said.supports if said else {})
    target = dataclasses.replace(target, performing=performing, apart=True)
    if said is not None:
        return target, repeat(target, said.case)
    return target, check(target, given.draws, given.seed, advance, failing)


def _report(given: _CheckKernelOptions, target: Target, verdict: Verdict) -> int:
    saved = _save(given, target, verdict)
    if talks(given.json_path, given.output):
        _print(target, verdict, saved)
    write_json(given.json_path, _record(target, verdict, saved))
    return int(verdict.failure is not None)


def _target(given: _CheckKernelOptions, name: str, kept: Mapping[str, Any]) -> Target:
    options = dict(kept) | dict(_field(text) for text in given.supports)
    operation = given.operation or options.pop("operation", "")
    return target_of(name, operation, given.device, given.timeout, **options)


def _field(text: str) -> tuple[str, Any]:
    """A field of `Supports` and its value, from `name=value,value`."""
    name, equals, values = text.partition("=")
    fields = {field.name: field.default for field in dataclasses.fields(Supports) if field.name != "operation"}
    if not equals or name not in fields:
        raise ConfigError("--supports", text, f"FIELD=VALUES with a field of {', '.join(fields)}")
    items = tuple(value.strip() for value in values.split(",") if value.strip())
    try:
        match fields[name]:
            case () if name in ("block_sizes", "heads", "head_sizes", "tokens"):
                sizes = tuple(int(item) for item in items)
                if not sizes or not all(0 < size <= 1 << 16 for size in sizes):
                    raise ValueError
                return name, sizes
            case ():
                return name, items
            case str():
                return name, values.strip()
            case None:
                return name, {"true": True, "false": False}[values.strip()]
            case number:
                return name, type(number)(values)
    except (ValueError, KeyError):
        raise ConfigError("--supports", text, f"numbers, or true or false, for {name}") from None


def _save(given: _CheckKernelOptions, target: Target, verdict: Verdict) -> str | None:
    if verdict.failure is None or (given.case is not None and not is_given("output")):
        return None
    path = given.output or CASE_FILE
    write_output(path, case_bytes(target, verdict.failure.case))
    return path


def _print(target: Target, verdict: Verdict, saved: str | None) -> None:
    if verdict.failure is not None:
        click.echo(verdict.failure.text)
        if saved is not None:
            click.echo(f"saved: hkv check-kernel --case {shlex.quote(saved)} repeats the case")
        return
    how = "within rounding" if verdict.operation == "attention" else "byte for byte"
    click.echo(f"{target.name}: {verdict.operation} as defined, {how}, in {counted(verdict.asked, 'case')}")
    rows = [(kind, name, count) for kind, names in _asked(verdict).items() for name, count in names.items()]
    console().print(table("asked||>cases", rows, box=None, pad_edge=False))
    if left := list(_not_asked(target, verdict)):
        click.echo(f"not asked: {', '.join(left)}")


def _asked(verdict: Verdict) -> dict[str, dict[str, int]]:
    """Cases with each layout, content, type and feature."""
    kinds = {"layout": _layouts(verdict.operation), "content": CONTENTS, "type": DTYPES, "feature": FEATURES}
    found = verdict.features
    return {kind: {name: found[name] for name in names if name in found} for kind, names in kinds.items()}


def _not_asked(target: Target, verdict: Verdict) -> Iterator[str]:
    """Names of what the kernel was not asked, each once: what was drawn and left out, and what was never drawn."""
    known = {"layouts": _layouts(verdict.operation), "contents": CONTENTS, "dtypes": DTYPES}
    never = list(not_asked_names(target.supports, known))
    yield from dict.fromkeys((*sorted(verdict.not_asked), *(name for name in never if name not in verdict.not_asked)))


def _layouts(operation: str) -> tuple[str, ...]:
    return FORMATS if operation in ("pack", "unpack") else FAMILIES


def _record(target: Target, verdict: Verdict, saved: str | None) -> dict[str, Any]:
    failure = verdict.failure
    told = None if failure is None else {"kind": failure.kind, "text": failure.text, "failed": failure.failed}
    return {
        "target": target.name,
        "operation": verdict.operation,
        "cases": verdict.asked,
        "asked": _asked(verdict),
        "not_asked": list(_not_asked(target, verdict)),
        "failure": told,
        "case": None if failure is None else failure.case,
        "saved": saved,
    }


def _names() -> dict[str, Any]:
    return {
        "operations": OPERATIONS,
        "arguments": dict(ARGUMENTS),
        "supports": [field.name for field in dataclasses.fields(Supports)],
        "layouts": FAMILIES,
        "formats": FORMATS,
        "contents": tuple(CONTENTS),
        "dtypes": DTYPES,
        "features": dict(FEATURES),
    }


def _print_names() -> None:
    for title, names in _names().items():
        if isinstance(names, dict):
            console().print(
                table(f"{title}|meaning", [map(escape, row) for row in names.items()], box=None, pad_edge=False), ""
            )
        else:
            console().print(f"{title}: {', '.join(names)}\n", highlight=False)
