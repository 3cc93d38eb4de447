"""Hook of hatchling's that gives the wheel `hkv-layouts` its files."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CHOSEN = runpy.run_path(str(pathlib.Path(__file__).with_name("chosen_files.py")))


class ChosenFiles(BuildHookInterface):
    """Hands hatchling the files, and the license."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds them by their paths below the root of the repository."""
        paths = [*CHOSEN["chosen_files"](), "LICENSE"]
        build_data["force_include"] |= {
            str(CHOSEN["ROOT"] / path): path.replace("LICENSE", "hkv/LICENSE") for path in paths
        }
