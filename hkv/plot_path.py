"""Names of files that plots are written to."""

from __future__ import annotations

import pathlib

from hkv.errors import ConfigError, MissingExtraError

SUFFIXES = (".png", ".svg")


def check_plot_path(path: str) -> None:
    """Raises ConfigError unless the path ends in one of `SUFFIXES` or is `-`, MissingExtraError without matplotlib."""
    if path != "-" and pathlib.Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError("plot", path, f"a file name that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots", "to draw the plot") from error
