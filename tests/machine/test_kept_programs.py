"""Executables are kept between processes, made again where they cannot be read, and never those of other code."""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hkv.machine import kept_programs
from hkv.machine.kept_programs import EDITED, FOLDER, SUFFIX, KeptProgram, keep


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, factor: int = 3) -> None:
        self.traced, self.factor = 0, factor

    def __call__(self, table: Any, line: Any) -> Any:
        self.traced += 1
        return {"sum": table.sum(axis=0) * self.factor + line, "line": jnp.sort(line)}, line[0]


def program(function: Counted, name: str = "counted-0", packages: tuple[str, ...] = ()) -> KeptProgram:
    return KeptProgram(function, (1,), name, lambda table, line: ({"sum": line, "line": line}, 0), packages)


def called(kept: KeptProgram, width: int = 4) -> None:
    table, line = np.arange(3 * width, dtype=np.int32).reshape(3, width), np.arange(width, 0, -1, dtype=np.int32)
    found, first = kept(jnp.asarray(table), jnp.asarray(line))
    np.testing.assert_array_equal(found["sum"], table.sum(axis=0) * 3 + line)
    np.testing.assert_array_equal(found["line"], np.sort(line))
    assert int(first) == width


@pytest.fixture
def folder(
    tmp_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user")))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def executables(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_a_program_is_traced_once_for_all_processes(folder):
    first, second = Counted(), Counted()
    kept = program(first)
    called(kept)
    called(kept)
    called(program(second))
    assert (first.traced, second.traced, kept.compilations()) == (1, 0, 1)
    assert len(executables(folder)) == 1
    assert [path.name for path in folder.iterdir()] == [executables(folder)[0].name]


def test_other_shapes_names_and_settings_are_other_programs(folder, monkeypatch):
    called(program(Counted()))
    for width, name, digest in ((5, "counted-0", None), (4, "counted-1", None), (4, "counted-0", "other sources")):
        with monkeypatch.context() as patch:
            if digest:
                patch.setattr(kept_programs, "_made_from", lambda _, digest=digest: digest)
            function = Counted()
            called(program(function, name), width)
            assert function.traced == 1, (width, name, digest)
    assert len(executables(folder)) == 4


def test_sources_of_other_packages_count_where_a_program_is_made_of_them(folder, tmp_path_factory, monkeypatch):
    package = tmp_path_factory.mktemp("packages") / "rules_of_another"
    package.mkdir()
    (package / "__init__.py").write_text("FACTOR = 3\n")
    monkeypatch.syspath_prepend(str(package.parent))
    importlib.import_module(package.name)
    for source, traced in (("FACTOR = 3\n", 1), ("FACTOR = 3\n", 0), ("FACTOR = 6 // 2\n", 1)):
        (package / "__init__.py").write_text(source)
        kept_programs._made_from.cache_clear()
        function = Counted()
        called(program(function, packages=(package.name,)))
        assert function.traced == traced


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], lambda data: b"-" + data[1:]])
def test_a_damaged_file_is_made_again(folder, damage):
    called(program(Counted()))
    (path,) = executables(folder)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    function = Counted()
    called(program(function))
    assert function.traced == 1
    called(program(function))
    assert function.traced == 1


def test_a_program_that_another_user_sealed_is_made_again(folder, tmp_path_factory, monkeypatch):
    with monkeypatch.context() as stranger:
        stranger.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("stranger")))
        called(program(Counted()))
    (path,) = executables(folder)
    planted = path.read_bytes()
    function = Counted()
    called(program(function))
    assert function.traced == 1
    assert path.read_bytes() != planted


@pytest.mark.parametrize("mode", [0o622, 0o662])
def test_a_program_that_others_may_write_is_made_again(folder, mode):
    called(program(Counted()))
    (path,) = executables(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(mode)
    function = Counted()
    called(program(function))
    assert function.traced == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_and_a_program_under_another_name_are_not_loaded(folder):
    called(program(Counted()))
    (path,) = executables(folder)
    aside = path.rename(path.with_suffix(".aside"))
    path.symlink_to(aside)
    function = Counted()
    called(program(function))
    assert function.traced == 1
    assert not path.is_symlink()
    another = Counted()
    called(program(another, "counted-1"))
    (other,) = [found for found in executables(folder) if found.name.startswith("counted-1")]
    other.write_bytes(path.read_bytes())
    again = Counted()
    called(program(again, "counted-1"))
    assert again.traced == 1


def test_nothing_is_kept_unless_a_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    called(program(Counted()))
    assert not list(tmp_path.iterdir())


def test_nothing_is_kept_of_edited_code(folder, monkeypatch):
    """An import hook has put another text in the place of a source, whose file is as it was (`hkv mutate`)."""
    called(program(Counted()))
    (kept,) = executables(folder)
    monkeypatch.setenv(EDITED, str(folder))
    edited = Counted()
    called(program(edited))
    called(program(edited, "counted-1"))
    assert edited.traced
    assert executables(folder) == [kept]


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file" / "inside"))
    function = Counted()
    called(program(function))
    called(program(function))
    assert function.traced == 2


def test_what_was_used_longest_ago_goes(tmp_path):
    for age, name in enumerate(("new", "old", "oldest")):
        path = tmp_path / f"{name}{SUFFIX}"
        path.write_bytes(bytes(100))
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "another").write_bytes(bytes(1000))
    keep(tmp_path / f"newest{SUFFIX}", bytes(100), limit=250)
    assert {path.name for path in tmp_path.iterdir()} == {f"newest{SUFFIX}", f"new{SUFFIX}", "another"}
    keep(tmp_path / f"large{SUFFIX}", bytes(300), limit=250)
    assert {path.name for path in executables(tmp_path)} == {f"large{SUFFIX}"}
