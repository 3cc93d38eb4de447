"""Files of strangers: bombs, nesting and endless lines are refused in one line, in little memory and time."""

from __future__ import annotations

import gzip
import json
import pathlib
import subprocess
import sys

import pytest

from hkv.errors import FileError
from hkv.files import LIMIT, decode_json, input_limit, lines_of, opened, read_whole
from hkv.replay.traces.formats import FORMATS
from hkv.replay.traces.imported import json_entries

MEMORY = 300 << 20
"""Most bytes that a command may take to refuse what it was given."""

SECONDS = 60
"""A bound against running without end; refusals take about a second each."""

MEASURED = """
import json, resource, subprocess, sys
done = subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, used.ru_utime + used.ru_stime)
"""
"""A program between the tests and the commands: a process starts with the peak of the one that it was forked from."""

COMMANDS = """
import contextlib, io, json, shlex, sys
from hkv.cli import main
for command in sys.argv[1:]:
    sys.argv = ["hkv", "--compilation-cache", "off", *shlex.split(command)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main()
            status = 0
        except SystemExit as ended:
            status = ended.code
    print(json.dumps([status, said.getvalue()]))
"""
"""Commands one after the other; whatever they print besides stands between."""

NESTED = b'{"a":' * 200_000 + b"1" + b"}" * 200_000

READERS = {
    "check": "check {}",
    "check invariants": "check --invariants {}",
    "explain": "explain {} --line 2",
    "shrink": "shrink {}",
    "replay": "replay {} --groups full:16 --num-blocks 100",
    "sweep": "sweep {} --groups full:16 --num-blocks 100 --retention dense,0",
    "compare": "compare {} --groups full:16 --num-blocks 100 --retention dense,0",
    "compare saved": "compare {0} {0}",
    "check-events": "check-events {}",
    "check-kernel": "check-kernel --case {}",
    "layout": "layout --plan {}",
    "plan": "plan {} --memory 80GiB",
    "plan layers": "plan --layers {} --memory 80GiB",
    "plan rtp-llm": "plan {} --dialect rtp-llm --memory 80GiB",
    "mutate": "mutate hkv.limits --state {} --sample 1 --by 'python -c pass'",
    **{
        f"import {name}": f"trace import {{}} --from {name} -o out.jsonl"
        + (" --tokenizer bytes" if "tokenizer" in form.options else "")
        for name, form in FORMATS.items()
        if name != "text"
    },
}
"""Every command that reads a file. A prompt may be any text: those of `text` have a test of their own."""

ENGINES = {
    "watch": "watch '{}' --seeds 1 --feature core",
    "diff": "diff --engines '{},numpy' --seeds 1 --feature core",
    "record": "record --engine '{}' --feature core --seed 1 -o out.jsonl",
}
"""Every command that starts an engine."""

CHATTER = {
    "zeros": "cmd:cat /dev/zero",
    "lines": "cmd:yes",
    "nesting": f'cmd:{sys.executable} -c "print(chr(91) * 200000, flush=True); input()"',
}
"""Engines that write without end, or what nobody can read."""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Files by what is wrong with them; the bombs are 2 MB that stand for 2 GiB."""
    folder = tmp_path_factory.mktemp("hostile")
    files = {name: folder / name for name in ("zeros.gz", "newlines.gz", "nested.json", "line.json")}
    for name, unit in (("zeros.gz", b"0"), ("newlines.gz", b"\n")):
        member = gzip.compress(unit * (1 << 26), compresslevel=6)
        files[name].write_bytes(member * 32)
    files["nested.json"].write_bytes(NESTED)
    files["line.json"].write_bytes(b'{"a":"' + b"x" * 20_000_000 + b'"}\n')
    return files


def refused(folder: pathlib.Path, *commands: str) -> list[str]:
    """Runs commands that are to refuse their input, and returns the one line of each."""
    arguments = [sys.executable, "-c", MEASURED, COMMANDS, *commands]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    *answers, measured = done.stdout.splitlines()
    found = [json.loads(line) for line in answers if line.startswith("[")]
    assert [(status, len(said.splitlines())) for status, said in found] == [(2, 1)] * len(commands), (
        found,
        done.stderr,
    )
    peak, seconds = map(float, measured.split())
    assert peak * (1 if sys.platform == "darwin" else 1024) < MEMORY, f"{peak:,.0f}"
    assert seconds < SECONDS
    return [said for _, said in found]


@pytest.mark.parametrize("readers", sorted({reader.split()[0] for reader in READERS}))
def test_every_reader_refuses(hostile, readers, tmp_path):
    """Commands of the same first word, in one process: what one of them leaves in memory counts for the next."""
    asked = [
        (READERS[reader].format(hostile[kind]), kind)
        for reader in READERS
        if reader.split()[0] == readers
        for kind in (hostile if reader in ("check", "replay") else ["zeros.gz", "nested.json", "line.json"])
    ]
    told = refused(tmp_path, *(command for command, _ in asked))
    assert all(kind in said for (_, kind), said in zip(asked, told, strict=True))


@pytest.mark.parametrize("starter", ENGINES)
def test_engines_that_write_without_end_are_ended(starter, tmp_path):
    told = refused(tmp_path, *(ENGINES[starter].format(engine) for engine in CHATTER.values()))
    assert all("hkv: engine wrote = " in said for said in told)


def test_prompts_have_the_limits_of_lines(hostile, tmp_path):
    kinds = ("zeros.gz", "newlines.gz", "line.json")
    command = "trace import {} --from text --tokenizer bytes -o out.jsonl"
    told = refused(tmp_path, *(command.format(hostile[kind]) for kind in kinds))
    assert all(kind in said for kind, said in zip(kinds, told, strict=True))


def test_lists_of_conversations_are_read_within_the_limit(hostile, tmp_path):
    listed = tmp_path / "listed.gz"
    listed.write_bytes(gzip.compress(b"[") + gzip.compress(b"0," * (1 << 24)) * 8)
    for path, reason in ((listed, "134,217,728 bytes"), (hostile["nested.json"], "nested too deeply")):
        with pytest.raises(FileError, match=reason):
            list(json_entries(str(path)))


def test_what_is_read_has_a_limit_that_can_be_raised(tmp_path, monkeypatch):
    path = str(tmp_path / "input.gz")
    pathlib.Path(path).write_bytes(gzip.compress(b'{"a": 1}\n' * 1000))
    monkeypatch.setenv(LIMIT, "8KiB")
    with pytest.raises(ValueError, match=r"more than 8,192 bytes of content.*--input-limit"):
        read_whole(path)
    with opened(path) as file, pytest.raises(ValueError, match=r"more than 8,192 bytes of content"):
        list(lines_of(file, path))
    monkeypatch.setenv(LIMIT, "18000B")
    assert len(read_whole(path)) == 9000
    monkeypatch.setenv(LIMIT, "112B")
    plain = tmp_path / "plain"
    plain.write_bytes(b"1234567\n12345678\n")
    with opened(str(plain)) as file, pytest.raises(ValueError, match=r"plain:1 = 'a line of more than 7 bytes'"):
        list(lines_of(file, str(plain)))
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(ValueError, match=r"HKV_INPUT_LIMIT = 'much': expected a size"):
        input_limit()


def test_nesting_is_named():
    with pytest.raises(ValueError, match=r"file:3 = .*expected a line \(nested too deeply\)"):
        decode_json(NESTED, "file", 3, "a line")
