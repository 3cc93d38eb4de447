"""Writing of output files: through links, with the right mode, onto devices and into pipes, and nowhere by halves."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys

import pytest

from hkv.errors import FileError
from hkv.files import OutputFile
from hkv.oracle.log_file import write_all_atomically, write_atomically
from tests.cli.commands import MODEL, at_most


def mode(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: pathlib.Path, umask: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "new", b"x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "new") == expected


def test_a_replaced_file_keeps_its_mode(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    for wanted in (0o600, 0o644, 0o755, 0o640):
        path.write_bytes(b"old")
        path.chmod(wanted)
        write_atomically(path, b"new")
        assert (path.read_bytes(), mode(path)) == (b"new", wanted)


def test_links_are_followed(tmp_path: pathlib.Path) -> None:
    """Through two of them, into another folder, and to where nothing is yet."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "second").symlink_to("folder/real")
    (tmp_path / "first").symlink_to("second")
    for data in (b"made", b"replaced"):
        write_atomically(tmp_path / "first", data)
        assert (tmp_path / "folder" / "real").read_bytes() == data
        assert (tmp_path / "first").is_symlink()
        assert (tmp_path / "second").is_symlink()


def test_links_in_a_circle(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileError):
        write_atomically(tmp_path / "a", b"x")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_device_is_written_and_stays_one() -> None:
    master, slave = os.openpty()
    try:
        path = os.ttyname(slave)
        write_atomically(path, b"a line\n")
        assert os.read(master, 100) == b"a line\r\n"
        assert stat.S_ISCHR(os.stat(path).st_mode)
    finally:
        os.close(master)
        os.close(slave)


def test_a_private_device_node(tmp_path: pathlib.Path) -> None:
    """As root an output file once replaced the device."""
    node = tmp_path / "node"
    try:
        os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.close(os.open(node, os.O_WRONLY))
    except PermissionError:
        pytest.skip("this user may not make or open device nodes")
    write_atomically(node, b"x" * 1000)
    assert stat.S_ISCHR(node.stat().st_mode)


def test_a_pipe_that_a_shell_substituted() -> None:
    reader, writer = os.pipe()
    try:
        write_atomically(f"/dev/fd/{writer}", b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_pipe_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        with pytest.raises(FileError, match="Broken pipe"):
            write_atomically(f"/dev/fd/{writer}", b"x")
    finally:
        os.close(writer)


def test_nothing_is_left_of_what_failed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with at_most(10), pytest.raises(FileError):
        write_atomically(path, bytes(100))
    with pytest.raises(KeyboardInterrupt):
        _interrupted(path)
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


def _interrupted(path: pathlib.Path) -> None:
    with OutputFile(path) as output:
        output.file.write(b"half")
        raise KeyboardInterrupt


def test_several_files_are_replaced_together(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"old")
    with at_most(10), pytest.raises(FileError):
        write_all_atomically({first: b"new", second: bytes(100)})
    assert first.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["first"]


def test_a_read_only_file_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(FileError, match="read-only"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def hkv(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hkv", *arguments], stderr=subprocess.PIPE, text=True, check=False, **options
    )


def test_a_process_whose_output_is_full(tmp_path: pathlib.Path) -> None:
    """One line, and no second one from Python, which tries to write what is buffered while it shuts down."""
    with (tmp_path / "full").open("wb") as full, at_most(100):
        done = hkv("plan", str(MODEL), "--memory", "8GiB", stdout=full)
    assert done.returncode == 2
    assert done.stderr == "hkv: standard output: File too large: expected room for what is written there\n"


def test_a_process_whose_reader_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = hkv("plan", str(MODEL), "--memory", "8GiB", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_path_of_standard_output(tmp_path: pathlib.Path) -> None:
    """`/dev/stdout` is `-`, wherever it leads: the file it was redirected to is not replaced under the shell's feet."""
    with (tmp_path / "out").open("wb") as out:
        inode = os.fstat(out.fileno()).st_ino
        assert hkv("plan", str(MODEL), "--memory", "8GiB", "--json", "/dev/stdout", stdout=out).returncode == 0
    assert (tmp_path / "out").stat().st_ino == inode
    assert (tmp_path / "out").read_bytes().startswith(b"{")
