"""Every command with output it cannot write: exit status, one line, nothing half-written.

Commands run in this process as `hkv.cli.main` runs them, standard output being a descriptor of its own. A full disk is
a limit on the size of files, a full device is a private pipe; the machine's own devices are never written to.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import stat
import threading

import pytest

import hkv.cli
from hkv.cli import CLOSED_PIPE
from hkv.cli.output_option import standard_output
from hkv.cli.progress import INTERRUPTED, Interruption
from hkv.files import OutputFile
from tests.cli.commands import (
    DIFFERENT,
    INPUTS,
    Inputs,
    complaint,
    contents,
    made,
    outputs,
    perform,
    target,
    with_output,
)

pytestmark = pytest.mark.usefixtures("nothing_is_compiled")

OUTPUTS = list(outputs())
CASES = [pytest.param(command, option, id=f"{command} {option or 'OUT'}") for command, option in OUTPUTS]
FULL = 40
"""Bytes that fit on the disk where it is full: fewer than any result has."""

FOLDERS = (("diff", "--save"), ("vectors", ""), ("watch", "--save"))
"""Outputs that are folders."""


@pytest.mark.parametrize(("command", "option"), CASES)
def test_outputs_that_cannot_be_written(
    command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path, capsys
) -> None:
    """Refused before any work: a folder where a file is wanted, a name below a file, no name at all."""
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    folder = (command, option) in FOLDERS
    for path in (file if folder else tmp_path, file / "below" / "result.svg", ""):
        ended = perform(with_output(inputs.arguments(command, tmp_path), option, path), tmp_path)
        assert (ended.status, ended.out) == (2, b""), path
        complaint(capsys)
        assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize(("command", "option"), CASES)
def test_outputs_that_this_user_may_not_write(
    command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Root may write everywhere, so the system's answer is put into its mouth."""
    locked = tmp_path / "locked"
    locked.mkdir()
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: locked not in (path, *pathlib.Path(path).parents) and allowed(path, mode)
    )
    ended = perform(with_output(inputs.arguments(command, made(tmp_path)), option, target(locked, option)), tmp_path)
    assert (ended.status, ended.out) == (2, b"")
    assert "Permission denied" in complaint(capsys)
    assert contents(locked) == {}


@pytest.mark.parametrize(("command", "option"), CASES)
def test_a_full_disk(command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    """The old file stays, nothing half-written is left beside it, and 1 does not come to mean "they differ"."""
    results = tmp_path / "results"
    results.mkdir()
    path = target(results, option)
    if (command, option) not in FOLDERS:
        path.write_bytes(b"precious")
    before = contents(results)
    arguments = with_output(inputs.arguments(command, made(tmp_path)), option, path)
    ended = perform(arguments, tmp_path, largest=FULL)
    assert ended.status == 2
    complaint(capsys)
    assert contents(results) == before


@pytest.mark.parametrize("command", INPUTS)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "JSON"])
def test_full_standard_output(command: str, as_json: bool, inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    arguments = [*inputs.arguments(command, tmp_path), *(["--json", "-"] if as_json else [])]
    assert perform_on_full_output(arguments) == 2
    assert "standard output" in complaint(capsys)


def perform_on_full_output(arguments: list[str]) -> int:
    """Runs a command whose standard output is a non-blocking pipe that nobody empties: it takes nothing more."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, bytes(1 << 16))
        except BlockingIOError:
            pass
        return hkv.cli.run(arguments, Interruption(), standard_output(writer))
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("command", INPUTS)
def test_a_closed_pipe_ends_quietly(command: str, inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        status = hkv.cli.run(inputs.arguments(command, tmp_path), Interruption(), standard_output(writer))
    finally:
        os.close(writer)
    assert status == CLOSED_PIPE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", INPUTS)
def test_no_standard_output_at_all(command: str, inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    status = hkv.cli.run(inputs.arguments(command, tmp_path), Interruption(), standard_output(None))
    assert status == 2
    assert "standard output" in complaint(capsys)


@pytest.mark.parametrize(("command", "option"), CASES)
def test_interrupted_while_writing(
    command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Ctrl-C just before a result is put in its place: what was there stays, and nothing is left beside it."""
    results = tmp_path / "results"
    results.mkdir()
    path = target(results, option)
    if (command, option) not in FOLDERS:
        path.write_bytes(b"precious")
    before = contents(results)

    def interrupted(output: OutputFile) -> None:
        if output.target is not None and results in output.target.parents:
            raise KeyboardInterrupt

    monkeypatch.setattr(OutputFile, "commit", interrupted)
    ended = perform(with_output(inputs.arguments(command, made(tmp_path)), option, path), tmp_path)
    assert ended.status == INTERRUPTED
    assert complaint(capsys) == "hkv: interrupted\n"
    assert contents(results) == before


@pytest.mark.parametrize(("command", "option"), CASES)
def test_a_dash_is_standard_output(command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path) -> None:
    """It then has nothing else, and it is what a file would have got."""
    if (command, option) in FOLDERS:
        return  # folders
    path = target(tmp_path, option)
    status = DIFFERENT.get(command, 0)
    arguments = inputs.arguments(command, made(tmp_path))
    assert perform(with_output(arguments, option, path), tmp_path).status == status
    ended = perform(with_output(arguments, option, "-"), tmp_path)
    assert ended.status == status
    if option == "--json":
        assert json.loads(ended.out).keys() == json.loads(path.read_bytes()).keys()
    elif option in ("--image", "--plot"):
        assert ended.out.startswith(b"<?xml")
    elif option != "--markdown":  # it has seconds in it
        assert ended.out == path.read_bytes()


def test_only_one_result_goes_to_standard_output(inputs: Inputs, tmp_path: pathlib.Path, capsys) -> None:
    ended = perform([*inputs.arguments("replay", tmp_path), "--json", "-", "--plot", "-"], tmp_path)
    assert (ended.status, ended.out) == (2, b"")
    assert "--json and --plot" in complaint(capsys)


@pytest.mark.parametrize(("command", "option"), CASES)
def test_pipes_are_written_as_streams(command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path) -> None:
    if (command, option) in FOLDERS:
        return  # folders
    fifo = target(tmp_path, option)
    os.mkfifo(fifo)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(fifo.read_bytes()))
    reader.start()
    ended = perform(with_output(inputs.arguments(command, made(tmp_path)), option, fifo), tmp_path)
    with contextlib.suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))  # lets the reader go if the command never came
    reader.join()
    assert ended.status == DIFFERENT.get(command, 0)
    assert got[0]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize(("command", "option"), CASES)
def test_links_stay_and_modes_are_kept(command: str, option: str, inputs: Inputs, tmp_path: pathlib.Path) -> None:
    if (command, option) in FOLDERS:
        return  # folders
    link = target(tmp_path, option)
    link.symlink_to("real")
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    ended = perform(with_output(inputs.arguments(command, made(tmp_path)), option, link), tmp_path)
    assert ended.status == DIFFERENT.get(command, 0)
    assert link.is_symlink()
    assert (tmp_path / "real").read_bytes() not in (b"", b"old")
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    assert not list(tmp_path.glob(".hkv-*"))
