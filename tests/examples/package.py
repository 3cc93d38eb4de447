"""A dialect's package as pip would install it, and HKV's commands in processes that see it."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).parents[2]


def installed(package: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The folder with a package and what its pyproject.toml registers."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    (place,) = project["entry-points"]["hkv.dialects"].values()
    module = place.partition(".")[0]
    shutil.copytree(package / module, folder / module, ignore=shutil.ignore_patterns("__pycache__"))
    info = folder / f"{module}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return folder


def run(site: pathlib.Path, *arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """A command of HKV, in a process of its own that sees the package."""
    path = os.pathsep.join([str(ROOT), str(site)])
    command = [sys.executable, "-c", "from hkv.cli import main; main()", *map(os.fspath, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)


def hkv(site: pathlib.Path, *arguments: str | os.PathLike[str], status: int = 0) -> str:
    """Output of a command that ends with a status."""
    done = run(site, *arguments)
    assert done.returncode == status, done.stderr + done.stdout
    return done.stdout
