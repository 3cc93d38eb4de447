"""`--compilation-cache`: where compiled programs are kept between commands.

JAX reads its settings from the environment when it is imported, which most commands never do: the option only sets the
environment, before a subcommand's module is imported.
"""

from __future__ import annotations

import os
import pathlib
import warnings

import click
from click.core import ParameterSource

from hkv.errors import ConfigError
from hkv.machine.program_folder import distrusted, user_folder

VARIABLE = "HKV_COMPILATION_CACHE"
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


def _chosen(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    typed = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    keep_programs(value or None, insist=typed)


compilation_cache_option = click.option(
    "--compilation-cache",
    metavar="DIR|off",
    envvar=VARIABLE,
    show_envvar=True,
    expose_value=False,
    callback=_chosen,
    help="Where compiled programs are kept, so that the next command need not compile them. They are run as the user "
    "who reads them: a folder that others may write to is refused.  [default: the user's cache folder]",
)
