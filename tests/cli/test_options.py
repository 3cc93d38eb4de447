"""Every option of every command changes something, or is refused: none is accepted and ignored."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hkv.cli import COMMANDS, cli
from hkv.dialects.vllm.explorer import Report
from hkv.errors import HKVError
from tests.cli.option_rows import CHANGES, REFUSED, ROWS, SPIED, Row
from tests.events.test_stream import PAYLOADS

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent

TOKENIZER = '{"version": "1.0", "model": {"type": "BPE", "unk_token": "?", "vocab": %s, "merges": []}}'

MODELS = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"

ENGINES = """
from hkv.dialects.vllm.engines.numpy import NumpyEngine
from hkv.dialects.vllm.log.structs import Hit

class Wrong(NumpyEngine):
    extra = 1
    def lookup(self, id):
        hit = super().lookup(id)
        return Hit(hit=hit.hit, blocks=hit.blocks, shared_prefix=hit.shared_prefix + self.extra)

class Worse(Wrong):
    extra = 2

class Blind(NumpyEngine):
    def lookup(self, id):
        hit = super().lookup(id)
        return Hit(hit=0, blocks=[[] for _ in hit.blocks], shared_prefix=hit.shared_prefix)
"""

SOURCES = {
    "long.jsonl": '{"timestamp": 0, "input_length": 6000, "output_length": 1, "hash_ids": null}\n',
    "mooncake.jsonl": '{"timestamp": 1, "input_length": 20, "output_length": 1, "hash_ids": [1]}\n'
    '{"timestamp": 2, "input_length": 30, "output_length": 1, "hash_ids": [2]}\n',
    "dynamo.jsonl": '{"session_id": "a", "input_length": 20, "output_length": 3, "hash_ids": [1]}\n'
    '{"session_id": "a", "delay": 5, "input_length": 20, "output_length": 3, "hash_ids": [1]}\n'
    '{"input_length": 20, "output_length": 3, "hash_ids": [2]}\n',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 18:17:{second:02},2000,8\n" for second in range(9)),
    "chats.json": '[{"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "a"}, '
    '{"from": "human", "value": "ba"}, {"from": "gpt", "value": "b"}]}]',
    "batch.jsonl": '{"custom_id": "1", "body": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}}\n',
    "answers.jsonl": '{"custom_id": "1", "response": {"body": {"choices": [{"message": {"content": "ba"}}]}}}\n',
    "tokenizer.json": TOKENIZER % '{"?": 0, "a": 1, "b": 2}',
    "other-tokenizer.json": TOKENIZER % '{"?": 0, "b": 1, "a": 2}',
}
"""Traces in formats of others, and what they need."""

BY_DIALECT = ("plan", "replay")
"""Commands whose options need a row under each dialect."""


def options_of(command: str) -> set[str]:
    """The longest name of each option of a command."""
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return {max(p.opts, key=len) for p in found.params if isinstance(p, click.Option)}


def command_of(arguments: Sequence[str]) -> str:
    """The command that a line calls: its first word, or the first two."""
    two = " ".join(arguments[:2])
    return two if two in COMMANDS else arguments[0]


def names_of(row: Row) -> list[str]:
    """Names of the option of a row, or the row's own word if no option is called so."""
    found = cli.get_command(click.Context(cli), command_of(row.base))
    assert found is not None
    return next((p.opts for p in found.params if row.option in (*p.opts, *p.secondary_opts)), [row.option])


def long_name(row: Row) -> str:
    return max(names_of(row), key=len)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_has_a_row(command: str) -> None:
    rows = [row for row in ROWS if command_of(row.base) == command]
    assert options_of(command) == {long_name(row) for row in rows}
    if command in BY_DIALECT:
        for dialect in (True, False):
            mine = {long_name(row) for row in rows if ("--dialect" in row.base) == dialect}
            assert options_of(command) == mine, "rtp-llm" if dialect else "vllm-0.33"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Folder with the files that the rows read."""
    from hkv.contract.events import BlockStored, EventBatch, encode_batch
    from hkv.oracle.events import Message, recorded_line

    folder = tmp_path_factory.mktemp("inputs")
    (folder / "wrong.py").write_text(ENGINES)
    for name, content in SOURCES.items():
        (folder / name).write_text(content)
    unknown = json.loads((MODELS / "llama.json").read_text()) | {"a_field_that_nobody_reads": 1}
    (folder / "unknown-field.json").write_text(json.dumps(unknown))
    (folder / "events.bin").write_bytes(b"".join(recorded_line(Message(*each)) for each in enumerate(PAYLOADS)))
    stored = (BlockStored([n], None, [n, n], 2, None, "GPU", None, group_idx=n) for n in (0, 1))
    (folder / "groups.jsonl").write_bytes(recorded_line(Message(0, encode_batch(EventBatch(0.0, tuple(stored))))))
    trace = ["trace", "chat", "--requests", "8", "--seed", "1", "--prompt-tokens", "60", "--output-tokens", "20"]
    recorded = ["record", "--engine", "numpy", "--seed", "7", "--dialect", "rtp-llm/hybrid", "--feature", "fork"]
    planned = ["plan", str(MODELS / "gemma3_text.json"), "--dialect", "rtp-llm", "--pools", "independent"]
    planned += ["--memory", "1GiB"]
    for arguments in (
        [*trace, "--prefix-tokens", "100", "--rate", "20", "--tokens-per-id", "16", "-o", str(folder / "trace.jsonl")],
        [*recorded, "-o", str(folder / "rtp.jsonl")],
        [*planned, "--json", str(folder / "plan.json")],
        [*planned, "--tp", "2", "--json", str(folder / "other-plan.json")],
    ):
        assert CliRunner().invoke(cli, arguments).exit_code == 0
    return folder


@pytest.fixture(autouse=True)
def spies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the functions that take too long to be called: they are replaced, and their arguments noted."""
    heard: list[str] = []

    class Publisher:
        def __init__(self, *arguments: Any) -> None:
            heard.append(f"follow {arguments}")

        def __enter__(self) -> list[Any]:
            return []

        def __exit__(self, *_: object) -> None:
            pass

    def explored(space: Any, **how: Any) -> Report:
        how.pop("progress")
        heard.append(f"explore {space} {how}")
        return Report(counterexample=None)

    def planted(name: str | None) -> Any:
        heard.append(f"plant {name}")
        return SPIED["planted"](None)

    def differ(*arguments: Any) -> Any:
        heard.append(f"differ {arguments[2:]}")
        return SPIED["differ"](*arguments)

    def shrinker(*arguments: Any) -> Any:
        heard.append(f"shrink up to {arguments[2]}")
        return SPIED["Shrinker"](*arguments)

    monkeypatch.setattr("hkv.dialects.vllm.explore_command.explore", explored)
    monkeypatch.setattr("hkv.dialects.vllm.explore_command.planted", planted)
    monkeypatch.setattr("hkv.cli.explore._check_folder", lambda path: heard.append(f"save {pathlib.Path(path).name}"))
    monkeypatch.setattr("hkv.cli.check_events.Subscription", Publisher)
    monkeypatch.setattr("hkv.cli.trace_import.Subscription", Publisher)
    monkeypatch.setattr("hkv.oracle.comparison.differ", differ)
    monkeypatch.setattr("hkv.cli.shrink.Shrinker", shrinker)
    monkeypatch.setattr("hkv.cli.workload.REQUESTS", 20)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # processes of their own would not know of what is replaced here
    for module in ("swept", "run", "result"):  # by default the reference, which compiles nothing
        monkeypatch.setattr(f"hkv.replay.{module}.default_engine", lambda cache: ("numpy", ""))
    return heard


def outcome(arguments: list[str], heard: list[str], folder: pathlib.Path) -> tuple[Any, ...]:
    """All that a command line leads to, but for how long it took: status, output, files, calls."""
    heard.clear()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    done = CliRunner().invoke(cli, [argument.replace("{out}", str(folder)) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit | HKVError):
        raise done.exception
    refused = isinstance(done.exception, HKVError) or done.exit_code == 2
    text = f"{done.output}{done.exception or ''}"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    return refused, done.exit_code, _without_times(text), files, tuple(heard)


def _without_times(text: str) -> str:
    try:
        result = json.loads(text)
    except ValueError:
        return re.sub(r"│ wall time .*", "", text)
    if isinstance(result, dict):
        result.pop("options", None)  # `hkv replay` repeats them: that is no effect
        result.get("totals", {}).pop("seconds", None)
        for name in ("seconds", "states_per_second"):
            result.pop(name, None)
    return json.dumps(result)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The one folder that all rows write to: its name is part of what they say."""
    return tmp_path_factory.mktemp("written") / "out"


@pytest.fixture(scope="module")
def known_outcomes() -> dict[tuple[str, ...], tuple[Any, ...]]:
    """First outcomes of command lines: many rows add to the same one."""
    return {}


class Outcomes:
    """`outcome` of command lines of `ROWS`, run in the project's folder."""

    def __init__(
        self, inputs: pathlib.Path, out: pathlib.Path, heard: list[str], known: dict[tuple[str, ...], tuple[Any, ...]]
    ) -> None:
        self._inputs, self._out, self._heard, self._known = inputs, out, heard, known

    def now(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """The command line is run."""
        return outcome([each.replace("{in}", str(self._inputs)) for each in arguments], self._heard, self._out)

    def first(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """The command line is run if no test of this file asked for its first outcome before."""
        if tuple(arguments) not in self._known:
            self._known[tuple(arguments)] = self.now(arguments)
        return self._known[tuple(arguments)]


@pytest.fixture
def outcomes(
    inputs: pathlib.Path,
    out: pathlib.Path,
    known_outcomes: dict[tuple[str, ...], tuple[Any, ...]],
    spies: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Outcomes:
    monkeypatch.chdir(ROOT)
    return Outcomes(inputs, out, spies, known_outcomes)


@pytest.mark.parametrize("row", ROWS, ids=[row.title for row in ROWS])
def test_an_option_changes_something_or_is_refused(row: Row, outcomes: Outcomes) -> None:
    before, after = outcomes.first(row.base), outcomes.now([*row.base, row.option, *row.value])
    if row.expected == REFUSED:
        assert after[0], f"accepted: {after[2]}"
        names = {name.lstrip("-").replace("-", "[-_]") for name in (row.option, *names_of(row))}
        assert re.search("|".join(names), after[2]), after[2]
        return
    assert row.expected == CHANGES
    assert before[0] or not after[0], after[2]
    assert before != after, "accepted and ignored"


def test_a_command_line_leads_to_the_same_twice(outcomes: Outcomes) -> None:
    """Otherwise every option would seem to change something."""
    for base in {row.base for row in ROWS if row.base[0] in ("trace", "trace import", "record", "check", "explore")}:
        if not any("cmd:" in argument for argument in base):
            assert outcomes.now(base) == outcomes.first(base)
