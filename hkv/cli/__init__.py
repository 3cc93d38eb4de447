"""The `hkv` command. Each subcommand is a module of this package, imported only when it is called."""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import io
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager

import click
from click.core import ParameterSource
from click.shell_completion import shell_complete

import hkv
from hkv import files
from hkv.cli.output_option import StandardOutputError, standard_output
from hkv.cli.progress import INTERRUPTED, Interruption
from hkv.errors import ConfigError, HKVError
from hkv.limits import parse_bytes
from hkv.machine import native_loops
from hkv.machine.program_folder import distrusted, user_folder

COMMANDS = {
    "check": "Check recorded logs against an engine's rules.",
    "check-connector": "Hold a connector's ranges of bytes to the plan, layout by layout.",
    "check-events": "Check KV events as routers read them, live or recorded.",
    "check-kernel": "Hold a kernel over paged caches to the definition, byte for byte.",
    "compare": "Hold replays of one trace against each other: totals, requests, causes.",
    "diff": "Drive two engines through the same random traffic and compare them.",
    "explain": "What happened to a request up to a line, and why its hit is not longer.",
    "explore": "Check every state that a small cache can reach, exhaustively.",
    "layout": "Draw where a block's bytes lie, and answer for addresses.",
    "mutate": "Edit a module in one place after another, and see what a test suite notices.",
    "plan": "Groups, pages, block counts and tensors of a model.",
    "record": "Record a log of random traffic from an engine.",
    "replay": "Replay a request trace through a hybrid cache.",
    "shrink": "Make a failing log as small as can be.",
    "sweep": "Replay a trace with every combination of some options.",
    "trace": "Generate a request trace.",
    "trace import": "Make a request trace of one in another format.",
    "watch": "Judge an engine under random traffic by the invariants of such caches alone.",
    "vectors": "Write conformance vectors as JSON, for tests in any language.",
}
"""Subcommands and their one-line descriptions. `a-name` and `a name` live in the module `hkv.cli.a_name`."""

CLOSED_PIPE = 141
"""Exit status when the reader of the output has gone: 128 and the number of SIGPIPE, as shells have it of others."""

COMPLETE = "_HKV_COMPLETE"
"""Environment variable in which a shell asks for its completion script, or for completions (click)."""

DEFECT = 70
"""Exit status of an error that HKV should not have made: 1 would mean "they differ" (sysexits.h `EX_SOFTWARE`)."""


class LazyGroup(click.Group):
    """A click group that imports a subcommand's module only when the subcommand is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"hkv.cli.{cmd_name.replace('-', '_').replace(' ', '_')}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The subcommand that the first argument names, or the first two together."""
        if " ".join(args[:2]) in COMMANDS:
            args = [" ".join(args[:2]), *args[2:]]
        elif args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


def _set_input_limit(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Hands the limit on in the environment, where worker processes find it too."""
    if value:
        parse_bytes(value, "--input-limit")
        os.environ[files.LIMIT] = value


def _keep_programs(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    typed = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    keep_programs(value or None, insist=typed)


@click.command(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--compilation-cache",
    metavar="DIR|off",
    envvar="HKV_COMPILATION_CACHE",
    show_envvar=True,
    expose_value=False,
    callback=_keep_programs,
    help="Where compiled programs are kept, so that the next command need not compile them. They are run as the user "
    "who reads them: a folder that others may write to is refused.  [default: the user's cache folder]",
)
@click.option(
    "--input-limit",
    metavar="SIZE",
    envvar=files.LIMIT,
    show_envvar=True,
    expose_value=False,
    callback=_set_input_limit,
    help="Most bytes of a compressed input, once decompressed; a JSON document may have half, a line a sixteenth.  "
    "[default: 256MiB]",
)
@click.version_option(hkv.__version__, prog_name="hkv")
@click.pass_context
def cli(context: click.Context) -> None:
    """The executable reference for hybrid KV caches.

    Example: hkv replay trace.jsonl --groups full:16,swa:16:1024 --num-blocks 20000
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


def main() -> None:
    """Runs the command line; an error of the user's input becomes one line on stderr and exit status 2."""
    native_loops.enable()
    gc.set_threshold(100_000, 20, 20)  # a trace and JAX are many objects that stay, and no cycles that matter
    interruption = Interruption()
    status = INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt), interruption.watched():  # it may come while the last line is written
        status = run(sys.argv[1:], interruption, _own_output())
    if status == INTERRUPTED:
        interruption.leave()
    sys.exit(status)


def _own_output() -> AbstractContextManager[None]:
    """The process's standard output; untouched where a program that calls `main` has put another in its place."""
    try:
        return standard_output(None if sys.stdout is None else sys.stdout.fileno())
    except io.UnsupportedOperation:
        return contextlib.nullcontext()


def run(arguments: Sequence[str], interruption: Interruption, output: AbstractContextManager[None]) -> int:
    """Performs one command, as typed without the program's name, with that standard output."""
    status = 0
    try:
        with output:
            try:
                status = _perform(arguments, interruption)
            except BaseException as error:
                if not (interruption.requested or isinstance(error, KeyboardInterrupt | click.Abort)):
                    raise
                interruption.report()
                status = INTERRUPTED
    except StandardOutputError as error:
        if status == INTERRUPTED:
            return status
        if error.closed:
            return CLOSED_PIPE
        return _complain(f"standard output: {error.reason}: expected room for what is written there")
    except Exception as error:
        return _explain(error)
    return status


def _perform(arguments: Sequence[str], interruption: Interruption) -> int:
    if asked := os.environ.get(COMPLETE):
        return shell_complete(cli, {}, "hkv", COMPLETE, asked)
    try:
        context = cli.make_context("hkv", list(arguments), obj=interruption)
        with context:
            status = cli.invoke(context)
    except click.exceptions.Exit as ended:
        status = ended.exit_code
    return status if isinstance(status, int) else 0


def _explain(error: Exception) -> int:
    """Reports an error; returns the exit status."""
    match error:
        case click.ClickException():
            return _complain(" ".join(error.format_message().split()))
        case HKVError():
            return _complain(" ".join(str(error).split()))
        case MemoryError():
            return _complain(f"memory: {error or 'exhausted'}: expected enough for what was asked")
        case BrokenPipeError():
            return CLOSED_PIPE
        case OSError():
            return _complain(f"{error.filename or 'system'}: {error.strerror or error}")
        case ModuleNotFoundError() if (error.name or "").partition(".")[0] == "reference":
            return _blame_foreign_reference(error)
    from hkv.contract import registry
    from hkv.contract.answer import failure_of

    if (dialect := registry.dialect_at_fault(error)) is not None:
        return _complain(" ".join(f"dialect {dialect}: {failure_of(error).message}".split()))
    return _admit(error)


def _complain(text: str) -> int:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # there is nowhere left to say it
            print(f"hkv: {files.printable(text)}", file=sys.stderr, flush=True)
    return 2


def _admit(error: Exception) -> int:
    """Shows an error that is a defect of HKV itself, with an exit status that no command gives another meaning."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(files.printable("".join(traceback.format_exception(error))))
    return DEFECT


def _blame_foreign_reference(error: ModuleNotFoundError) -> int:
    """Complains of another package called `reference` that hides HKV's, where that is why a part of it is missing."""
    from hkv.version import check_reference

    try:
        check_reference()
    except HKVError as shadowed:
        return _complain(str(shadowed))
    return _admit(error)


# `--compilation-cache`: where compiled programs are kept between commands.
#
# JAX reads its settings from the environment when it is imported, which most commands never do: the option only sets
# the environment, before a subcommand's module is imported.

PROGRAMS = "HKV_PROGRAM_FOLDER"
"""`hkv.machine.kept_programs.FOLDER`, which imports JAX."""

OFF = "off"

MAX_SIZE = 1 << 28
"""Bytes of JAX's cache, which drops what was used longest ago; `hkv.machine.kept_programs` has as much beside it."""

LEAST_SECONDS = 0.2
"""Programs that compile faster are not kept: reading one costs as much."""

ENTRY, USED = "-cache", "-atime"
"""Suffixes of JAX's files: a program, and when it was last used, which is written after it."""


def keep_programs(where: str | None, *, insist: bool = False) -> None:
    """Asks JAX, before it is imported, to keep compiled programs in a folder.

    None stands for `JAX_COMPILATION_CACHE_DIR` if that is set, otherwise the user's folder; `off` keeps and reads
    nothing. A folder that cannot be made or written is an error if `insist`, else nothing is kept; one that was named
    and that somebody else may write to is an error.
    """
    if where == OFF:
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        os.environ.pop(PROGRAMS, None)
        return
    if where is None and os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = user_folder() if where is None else pathlib.Path(where).expanduser()
    if folder is None or not _ready(folder):
        if insist:
            raise ConfigError("--compilation-cache", where, f"a folder that can be written, or {OFF}")
        return
    if reason := distrusted(folder):
        if where is not None:
            expected = f"a folder that nobody else may write to, as programs kept there are run: {reason}"
            raise ConfigError("--compilation-cache", where, expected)
        click.echo(f"hkv: compiled programs are not kept: {reason}", err=True)
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ[PROGRAMS] = str(folder.absolute())
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MAX_SIZE))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(LEAST_SECONDS))
    # A disk that fills up, or a file that another process damaged, costs time and nothing else.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")


def _ready(folder: pathlib.Path) -> bool:
    """Makes the folder, and removes what an interrupted write left: JAX would neither use nor replace it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in folder.glob(f"*{ENTRY}"):
            if not entry.with_name(entry.name.removesuffix(ENTRY) + USED).exists():
                entry.unlink(missing_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
