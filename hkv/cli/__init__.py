"""The `hkv` command. Each subcommand is a module of this package, imported only when it is called."""

from __future__ import annotations

import importlib
import sys

import click

import hkv
from hkv import native_loops
from hkv.cli.compilation_cache import compilation_cache_option
from hkv.errors import HKVError

COMMANDS = {
    "check": "Check recorded logs against an engine's rules.",
    "check-events": "Check KV events as routers read them, live or recorded.",
    "diff": "Drive two engines through the same random traffic and compare them.",
    "explain": "What happened to a request up to a line, and why its hit is not longer.",
    "explore": "Check every state that a small cache can reach, exhaustively.",
    "layout": "Draw where a block's bytes lie, and answer for addresses.",
    "mutants": "Plant published bugs one at a time and see which invariant catches each.",
    "plan": "Groups, pages, block counts and tensors of a model.",
    "record": "Record a log of random traffic from an engine.",
    "replay": "Replay a request trace through a hybrid cache.",
    "shrink": "Make a failing log as small as can be.",
    "trace": "Generate a request trace.",
    "vectors": "Write conformance vectors as JSON, for tests in any language.",
}
"""Subcommands and their one-line descriptions. `name` lives in the module `hkv.cli.name`, its `-` read as `_`."""


class LazyGroup(click.Group):
    """A click group that imports a subcommand's module only when the subcommand is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all subcommands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The subcommand of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"hkv.cli.{cmd_name.replace('-', '_')}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@compilation_cache_option
@click.version_option(hkv.__version__, prog_name="hkv")
def cli() -> None:
    """The executable reference for hybrid KV caches.

    Example: hkv replay trace.jsonl --groups full:16,swa:16:1024 --num-blocks 20000
    """


def main() -> None:
    """Runs the command line; an error of the user's input becomes one line on stderr and exit status 2."""
    native_loops.enable()
    try:
        status = cli.main(standalone_mode=False)
    except click.ClickException as error:
        print(f"hkv: {' '.join(error.format_message().split())}", file=sys.stderr)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except HKVError as error:
        print(f"hkv: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        _blame_foreign_reference(error)
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


def _blame_foreign_reference(error: ModuleNotFoundError) -> None:
    """If a part of `reference` is missing, says which other package of that name hides HKV's, and ends."""
    if (error.name or "").partition(".")[0] != "reference":
        return
    from hkv.oracle.engines.numpy import check_reference

    try:
        check_reference()
    except HKVError as shadowed:
        print(f"hkv: {shadowed}", file=sys.stderr)
        sys.exit(2)
