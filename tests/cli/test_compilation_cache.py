"""Compiled programs are kept between commands: where the user says, within a size, and never at a message's cost."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

import hkv.cli
from hkv.cli import MAX_SIZE, cli, keep_programs, user_folder
from hkv.errors import ConfigError

SETTINGS = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_COMPILATION_CACHE_MAX_SIZE",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_ENABLE_COMPILATION_CACHE",
    "HKV_COMPILATION_CACHE",
)

PROGRAM = """
import sys
from hkv.cli import keep_programs
keep_programs(sys.argv[1])
import jax, jax.numpy as jnp
print(int(jax.jit(lambda x: jnp.sort(x)[0])(jnp.arange(7, 3, -1))))
"""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(sys, "platform", "linux")


def folder() -> str | None:
    return os.environ.get("JAX_COMPILATION_CACHE_DIR")


def test_the_users_folder_follows_the_platform(monkeypatch, tmp_path):
    assert user_folder() == tmp_path / "user" / "hkv"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_folder() == pathlib.Path.home() / ".cache" / "hkv"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_folder() == pathlib.Path.home() / "Library" / "Caches" / "hkv"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert user_folder() == tmp_path / "hkv"


def test_by_default_the_users_folder_is_used_and_bounded(tmp_path):
    keep_programs(None)
    assert folder() == str(tmp_path / "user" / "hkv")
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == str(MAX_SIZE)
    assert (tmp_path / "user" / "hkv").stat().st_mode & 0o777 == 0o700


def test_what_the_user_told_jax_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    keep_programs(None)
    assert folder() == "/elsewhere"
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ
    keep_programs(str(tmp_path / "mine"))
    assert folder() == str(tmp_path / "mine")


@pytest.mark.parametrize("arguments", [["--compilation-cache", "off"], []])
def test_it_can_be_switched_off(monkeypatch, arguments):
    if not arguments:
        monkeypatch.setenv("HKV_COMPILATION_CACHE", "off")
    CliRunner().invoke(cli, [*arguments, "check", "nothing"])
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert folder() is None


def test_it_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("HKV_COMPILATION_CACHE", str(tmp_path / "a"))
    CliRunner().invoke(cli, ["check", "nothing"])
    assert folder() == str(tmp_path / "a")
    CliRunner().invoke(cli, ["--compilation-cache", str(tmp_path / "b"), "check", "nothing"])
    assert folder() == str(tmp_path / "b")


def test_a_folder_that_cannot_be_is_an_error_only_where_it_was_typed(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    result = CliRunner().invoke(cli, ["--compilation-cache", str(file), "check", "nothing"])
    assert isinstance(result.exception, ConfigError)
    assert str(file) in str(result.exception)
    monkeypatch.setenv("HKV_COMPILATION_CACHE", str(file / "inside"))
    CliRunner().invoke(cli, ["check", "nothing"])
    monkeypatch.setattr(hkv.cli, "user_folder", lambda: None)
    keep_programs(None)
    assert folder() is None


def planted(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, how: str) -> str:
    """Makes the folder one that somebody else may write to, and returns what is said of it."""
    folder.mkdir(parents=True, mode=0o700)
    if how == "folder":
        folder.chmod(0o777)
        return f"others may write to {folder}"
    if how == "file":
        folder.chmod(0o755)
        (folder / "program.executable").write_bytes(b"")
        (folder / "program.executable").chmod(0o666)
        return f"others may write to {folder / 'program.executable'}"
    if how == "parent":
        folder.parent.chmod(0o777)
        return f"others may write to {folder.parent}, above it"
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    return f"{folder} belongs to another user"


@pytest.mark.parametrize("how", ["folder", "file", "parent", "owner"])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, monkeypatch, capsys, how):
    named = tmp_path / "above" / "named"
    reason = planted(named, monkeypatch, how)
    monkeypatch.setenv("HKV_COMPILATION_CACHE", str(named))
    result = CliRunner().invoke(cli, ["check", "nothing"])
    assert isinstance(result.exception, ConfigError)
    assert reason in str(result.exception)
    assert folder() is None
    monkeypatch.setattr(hkv.cli, "user_folder", lambda: named)
    keep_programs(None)
    assert folder() is None
    assert f"compiled programs are not kept: {reason}" in capsys.readouterr().err


def test_a_second_process_finds_the_program(tmp_path, monkeypatch):
    """Also after a write that was cut off, and silently when the folder is damaged."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 20))

    def run() -> dict[str, int]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("4\n", "")
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*-cache")}

    first = run()
    assert first
    assert run() == first
    name = next(name for name in first if "lambda" in name)
    (tmp_path / name).write_bytes(b"half")
    (tmp_path / name.replace("-cache", "-atime")).unlink()
    third = run()
    assert third.keys() == first.keys()
    assert (tmp_path / name).stat().st_size > 4
    (tmp_path / name).write_bytes(b"half")
    run()
