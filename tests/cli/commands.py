"""The smallest use of every command, for what holds for all of them: how they fail, and where they write."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import resource
import sys
from collections.abc import Iterator, Sequence

import click
import pytest

import hkv.cli
from hkv.cli.output_option import OutputFolder, OutputPath, standard_output
from hkv.cli.progress import Interruption
from hkv.contract.events import BlockStored, EventBatch, encode_batch
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.oracle.engines import engine_factory
from hkv.oracle.events import Message, recorded_line
from hkv.oracle.log_file import write_log
from hkv.oracle.record import Only, record
from hkv.oracle.shrink import Shrinker

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WRONG = f"{ROOT / 'examples' / 'wrong_engine.py'}:WrongEngine"
MODEL = ROOT / "tests" / "data" / "models" / "llama.json"
KERNELS = ROOT / "tests" / "testing" / "kernels" / "planted.py"

ONE_FULL = ("--kinds", "full_attention", "--max-groups", "1", "--version", "1", "--seeds", "5")
"""Traffic in which the wrong engine differs."""

INPUTS = {
    "check": ("{log}",),
    "check-connector": (f"{ROOT / 'examples' / 'connector.py'}:block_ranges", "--engine", "lmcache"),
    "check-events": ("{events}",),
    "check-kernel": (f"{KERNELS}:only_keys_zeroed", "--operation", "zero", "--draws", "20", "-o", "{folder}/case.json"),
    "compare": ("{trace}", "--groups", "full:16", "--num-blocks", "32;64", "--engine", "numpy", "--jobs", "1"),
    "diff": ("--engines", f"{WRONG},numpy", "--no-shrink", "--feature", "core", *ONE_FULL, "--save", "{folder}/found"),
    "explain": ("{log}", "--line", "6"),
    "explore": ("--num-blocks", "3", "--save", "{folder}/found.jsonl"),
    "layout": ("--spec", "full:16"),
    "mutate": ("hkv.limits", "--by", "python -c 'import hkv.limits'", "--sample", "1"),
    "plan": ("{model}", "--memory", "8GiB"),
    "record": (*("--engine", "numpy", "--feature", "core", "--seed", "2"), "--steps", "2", "-o", "{folder}/log.jsonl"),
    "replay": ("{trace}", "--groups", "full:16,swa:16:32", "--num-blocks", "64", "--engine", "numpy"),
    "shrink": ("{failing}", "--engine", WRONG, "-o", "{folder}/small.jsonl"),
    "sweep": ("{trace}", "--groups", "full:16", "--num-blocks", "32..64:2", "--engine", "numpy", "--jobs", "1"),
    "trace": ("chat", "--requests", "2", "-o", "{folder}/made.jsonl"),
    "trace import": ("{trace}", "--from", "mooncake", "--tokens-per-id", "16", "-o", "{folder}/made.jsonl"),
    "watch": (WRONG, "--feature", "core", *ONE_FULL),
    "vectors": ("{folder}/vectors",),
}
"""Arguments of each command, the names of files left open."""

DIFFERENT = {"check-kernel": 1, "diff": 1, "explore": 1, "mutate": 1, "watch": 1}
"""Exit statuses of these uses that are not 0: all find something, so that they write everything that they can."""

FILES = {
    "check": "{log}",
    "check-events": "{events}",
    "compare": "{trace}",
    "explain": "{log}",
    "plan": "{model}",
    "replay": "{trace}",
    "shrink": "{failing}",
    "sweep": "{trace}",
    "trace import": "{trace}",
}
"""The file that a command reads."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Files that the commands read, whole and valid, in a folder that nothing else is written to."""

    log: pathlib.Path
    failing: pathlib.Path
    trace: pathlib.Path
    events: pathlib.Path
    model: pathlib.Path = MODEL

    def arguments(self, command: str, folder: pathlib.Path, **others: object) -> list[str]:
        """The smallest use of a command that writes into `folder`, with other files than these where named."""
        names = {**vars(self), "folder": folder, **others}
        return [*command.split(), *(text.format(**names) if "{" in text else text for text in INPUTS[command])]


def make_inputs(folder: pathlib.Path) -> Inputs:
    """Writes the files."""
    inputs = Inputs(*(folder / name for name in ("log.jsonl", "failing.jsonl", "trace.jsonl", "events.jsonl")))
    only = Only(frozenset({"full_attention"}), 1)
    recording = record(NumpyEngine, "core", 1, 1, 16, only)
    write_log(inputs.log, recording.header, recording.operations[:6], recording.answers[:6])
    shrinker = Shrinker(engine_factory(WRONG, 10.0), NumpyEngine)
    case = shrinker.failing(recording.header, recording.operations)
    assert case is not None
    small = shrinker.shrink(case)
    write_log(inputs.failing, small.header, small.operations, small.answers)
    request = {"timestamp": 0, "input_length": 40, "output_length": 2, "hash_ids": [0, 1, 2], "tokens_per_id": 16}
    inputs.trace.write_text("".join(json.dumps({**request, "timestamp": time}) + "\n" for time in (0, 100)))
    batch = encode_batch(EventBatch(0.0, (BlockStored([1], None, [1, 2], 2, None, "GPU", None, group_idx=0),)))
    inputs.events.write_bytes(recorded_line(Message(0, batch)))
    return inputs


@dataclasses.dataclass(frozen=True)
class Ended:
    """Result of a command; `out` is what standard output got."""

    status: int
    out: bytes


def perform(arguments: Sequence[str], folder: pathlib.Path, largest: int | None = None) -> Ended:
    """Runs a command line in this process, as `hkv.cli.main` does, standard output being a file.

    Args:
      arguments: as typed.
      folder: for the file, which is removed again.
      largest: bytes that a file may grow to meanwhile, as on a full disk; None for no limit.
    """
    path = folder / "standard-output"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with at_most(largest):
            status = hkv.cli.run(arguments, Interruption(), standard_output(descriptor))
        return Ended(status, path.read_bytes())
    finally:
        os.close(descriptor)
        path.unlink()


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Runs a command line in this process, as typed; exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["hkv", *arguments])
    with pytest.raises(SystemExit) as stopped:
        hkv.cli.main()
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@contextlib.contextmanager
def at_most(largest: int | None) -> Iterator[None]:
    """Files of this process grow no larger than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = sys.dont_write_bytecode
    # Python would keep the first bytes of a compiled module as the whole; processes that it starts would, too.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    try:
        if largest is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = kept
        del os.environ["PYTHONDONTWRITEBYTECODE"]


def definition(command: str) -> click.Command:
    """The command as click has it."""
    return importlib.import_module(f"hkv.cli.{command.replace('-', '_').replace(' ', '_')}").command


def outputs() -> Iterator[tuple[str, str]]:
    """Every command and each of its options and arguments that name something to write."""
    for command in hkv.cli.COMMANDS:
        for parameter in definition(command).params:
            if isinstance(parameter.type, OutputPath | OutputFolder):
                yield command, parameter.opts[-1] if isinstance(parameter, click.Option) else ""


def with_output(arguments: Sequence[str], option: str, path: pathlib.Path | str) -> list[str]:
    """A command line that writes to `path` what an option, or for "" the only argument, names."""
    if not option:
        return [arguments[0], str(path)]
    kept = list(arguments)
    for index in range(len(kept) - 1):
        if kept[index] in (option, "-o" if option == "--output" else option):
            return [*kept[: index + 1], str(path), *kept[index + 2 :]]
    return [*kept, option, str(path)]


# Traces of a command that ended.


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error."""
    error = capsys.readouterr().err
    assert error.startswith("hkv: "), error
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    return error


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(folder: pathlib.Path) -> pathlib.Path:
    """A folder next to the one that is looked at, for what else a command writes."""
    other = folder / "other"
    other.mkdir()
    return other


def target(folder: pathlib.Path, option: str) -> pathlib.Path:
    """Path for an output option: a file of a suffix that it takes, or for "" and `--save` of `diff` a folder."""
    return folder / ("result.svg" if option in ("--image", "--plot") else "result")
