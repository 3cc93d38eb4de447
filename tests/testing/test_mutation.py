"""`hkv mutate`: the edits of a text, the hook that puts one in place, verdicts, what is refused, and interruption."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner, Result

from hkv.cli import cli
from hkv.errors import ConfigError
from hkv.testing.mutation.edits import edits_of
from hkv.testing.mutation.trials import Judge, Verdict, VerdictFile, target_of

MODULE = '''\
"""A window's first block."""
from __future__ import annotations


def first(tokens: int, window: int, block: int = 4) -> int:
    """Block."""
    if tokens < window:
        return 0
    return max(tokens - window, 0) // block


def unused(tokens: int) -> int:
    return tokens + 1
'''

CHECK = """\
import windows
assert windows.first(16, 8) == 2
assert windows.first(3, 8) == 0
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "windows.py").write_text(MODULE)
    (tmp_path / "check.py").write_text(CHECK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mutate(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["mutate", "windows.py", "--by", "python check.py", *arguments])


def told(source: str) -> set[str]:
    """Descriptions of the edits of an expression or a few statements."""
    return {edit.described for edit in edits_of(source)}


@pytest.mark.parametrize(
    ("source", "edits"),
    [
        ("a < b", "`<` -> `<=`"),
        ("a <= b < c", "`<=` -> `<`; `<` -> `<=`"),
        ("a is  not b", "`is not` -> `is`"),
        ("a not in b", "`not in` -> `in`"),
        ("a and (b) and c", "`and` -> `or`"),
        ("not a", "`not` dropped"),
        ("(end - 1) // unit", "`//` -> `*`; `-` -> `+`; `- 1` dropped; `1` -> `0`; `1` -> `2`"),
        ("left > 1", "`>` -> `>=`; `1` -> `0`; `1` -> `2`"),
        ("window + eagle", "`+` -> `-`; `+ eagle` dropped"),
        ("outer.sort()", "`outer.sort()` -> `pass`"),
        ("length -= a", "`length -= a` -> `pass`; `-=` -> `+=`"),
        ("x = sorted(a)", "`sorted(a)` -> `a`"),
        ("x = ceil(a | b)", "`ceil(a | b)` -> `(a | b)`; `|` -> `&`"),
        ("x = len(a)", ""),
        ("x = min(a, b)", "`min` -> `max`"),
        ("x = jnp.maximum(a, b)", "`maximum` -> `minimum`"),
        ("x = take(a, b, 'c')", "`a, b` -> `b, a`"),
        ("x = a[b:c]", "`+ 1` inserted; `- 1` inserted"),
        ("x = range(n)", "`- 1` inserted"),
        ("x = -a", "`-` dropped"),
        ("x: int | None = True", "`True` -> `False`"),
        ("if a: pass", "`not` inserted"),
        ("for a in b: break", "`break` -> `continue`"),
        ("if TYPE_CHECKING: a = 1", ""),
        ("raise E(f'{a + 1}', 2)", ""),
        ("assert a < 1", ""),
        ("x = zip(a, b, strict=True)", "`a, b` -> `b, a`"),
        ("logger.info(a + 1)", ""),
        ("a < b  # pragma: no mutate", ""),
        ("@deco(1)\ndef f(a: L[1] = 2) -> L[3]: ...", "`2` -> `1`; `2` -> `3`"),
    ],
)
def test_edits(source: str, edits: str) -> None:
    assert told(source) == set(filter(None, edits.split("; ")))


def test_every_edit_changes_one_place_and_is_python() -> None:
    source = (pathlib.Path(__file__).parents[2] / "examples" / "toy_engine.py").read_text()
    plain, lines, found = ast.dump(ast.parse(source)), source.splitlines(), edits_of(source)
    assert len(found) > 100
    for edit in found:
        assert ast.dump(ast.parse(edit.applied(source))) != plain, edit
        assert lines[edit.line - 1].encode()[edit.column - 1 :].startswith(edit.old.split("\n")[0].encode()), edit


def test_a_class_or_a_function_is_edited_alone() -> None:
    source = "a = 1\nclass B:\n    def c(self): return 2\n    d = 3\nclass Bx:\n    e = 4\n"
    assert {edit.function for edit in edits_of(source, "B")} == {"B.c", "B"}
    assert {edit.old for edit in edits_of(source, "B.c")} == {"2"}
    with pytest.raises(ConfigError, match=r"qualified name of a class or function"):
        edits_of(source, "c")


def test_a_table_of_what_survives(folder: pathlib.Path) -> None:
    ended = mutate("--json", "found.json")
    assert ended.exit_code == 1
    assert ended.output.splitlines() == [
        "survived          windows.py:5:50  first  `4` -> `3`",
        "survived          windows.py:7:15  first  `<` -> `<=`",
        "survived          windows.py:9:33  first  `0` -> `1`",
        "not reached       windows.py:13:19  unused  `+` -> `-`",
        "not reached       windows.py:13:19  unused  `+ 1` dropped",
        "not reached       windows.py:13:21  unused  `1` -> `0`",
        "not reached       windows.py:13:21  unused  `1` -> `2`",
        "windows.py: 6 of 13 edits noticed (46%), 4 not reached, 3 survived",
    ]
    found = json.loads((folder / "found.json").read_text())
    assert (found["edits"], found["judged"], found["noticed"], found["seed"]) == (13, 13, 6, None)
    assert [one["line"] for one in found["verdicts"] if one["outcome"] == "survived"] == [5, 7, 9]
    assert (folder / "windows.py").read_text() == MODULE
    assert not list(folder.glob("**/*.pyc"))


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    once, again, other = (mutate("--list", "--sample", "6", "--seed", seed).output for seed in "334")
    assert once == again != other
    assert len(once.splitlines()) == 6
    assert set(once.splitlines()) < set(mutate("--list").output.splitlines())


def test_an_endless_edit_is_ended(folder: pathlib.Path) -> None:
    (folder / "windows.py").write_text("def down(a: int) -> int:\n    while a > 1:\n        a -= 1\n    return a\n")
    (folder / "check.py").write_text("import windows\nassert windows.down(3) == 1\n")
    target = target_of("windows.py")
    judge = Judge(target, "python check.py", 1)
    judge.check()
    (edit,) = (edit for edit in target.edits() if edit.kind == "dropped assignment")
    assert judge.try_edit(edit).outcome == "timed out"


def test_a_judge_that_sleeps_is_ended(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hkv.testing.mutation.trials.BY_CLOCK", 0.5)
    (folder / "check.py").write_text("import time, windows\nif windows.first(3, 8): time.sleep(600)\n")
    target = target_of("windows.py")
    judge = Judge(target, "python check.py", 4)
    judge.check()
    (edit,) = (edit for edit in target.edits() if edit.described == "`0` -> `1`" and edit.line == 8)
    verdict = judge.try_edit(edit)
    assert (verdict.outcome, verdict.status) == ("timed out", -signal.SIGKILL)


def test_what_is_judged_is_not_judged_again(folder: pathlib.Path) -> None:
    state = folder / "trials.jsonl"
    mutate("--state", str(state), "--sample", "6", "--seed", "3")
    header, *lines = state.read_text().splitlines()
    assert len(lines) == 6
    lied = [line.replace('"killed"', '"survived"') for line in lines]
    state.write_text("\n".join([header, *lied]) + '\n{"key":"1:')  # the last line was cut off
    assert "0 of 6 edits" in mutate("--state", str(state), "--sample", "6", "--seed", "3").output
    whole = json.loads(mutate("--state", str(state), "--json", "-").output)
    assert (whole["judged"], len(state.read_text().splitlines())) == (13, 14)
    (folder / "check.py").unlink()
    assert json.loads(mutate("--state", str(state), "--json", "-").output) == whole, "nothing is left to be judged"


@pytest.mark.parametrize("begun", [False, True])
def test_a_refused_judge_leaves_no_state_behind(begun: bool, folder: pathlib.Path) -> None:
    """The corrected command is taken, also where a file was begun without a verdict."""
    state = folder / "trials.jsonl"
    (folder / "check.py").write_text("raise SystemExit(1)")
    assert isinstance(mutate("--state", str(state)).exception, ConfigError)
    assert not state.exists()
    if begun:
        state.write_text('{"module":"m","source":"s","by":"another"}\n')
    (folder / "check.py").write_text(CHECK)
    ended = mutate("--state", str(state), "--sample", "2")
    assert "of 2 edits" in ended.output
    assert len(state.read_text().splitlines()) == 3


@pytest.mark.parametrize("change", ["module", "judge", "content", "folder"])
def test_a_state_file_of_something_else_is_refused(change: str, folder: pathlib.Path) -> None:
    state = folder / "trials.jsonl"
    mutate("--state", str(state), "--sample", "1")
    if change == "module":
        (folder / "windows.py").write_text(MODULE + "\n")
    elif change == "judge":
        other = VerdictFile(state := folder / "other.jsonl", target_of("windows.py"), "python other.py")
        other.add(Verdict("1:1", "killed", 1.0, 1))
    elif change == "content":
        state.write_text("trials\n")
    else:
        state = folder
    ended = mutate("--state", str(state))
    assert ended.exit_code != 0
    assert isinstance(ended.exception, ConfigError)
    assert ended.exception.argument == "--state"


@pytest.mark.parametrize(
    ("module", "judge", "expected"),
    [
        ("windows.py", "python -c pass", "a judge that imports"),
        (
            "windows.py",
            "python -c 'import windows; assert 0'",
            "exit status 0 on unedited code, not 1 (AssertionError)",
        ),
        ("windows.py", "no-such-program", "a program that can be started"),
        ("windows.py", "", "a command line"),
        ("windows.py", "'", "a command line"),
        ("windows.py:last", "python check.py", "qualified name of a class or function that the module defines"),
        ("doors.py", "python check.py", "a module that can be imported"),
        ("doors", "python check.py", "a module that can be imported"),
        ("doors.open", "python check.py", "a module that can be imported"),
        ("sys", "python check.py", "a module that can be imported"),
        ("", "python check.py", "a module that can be imported"),
    ],
)
def test_what_cannot_be_judged_is_refused(module: str, judge: str, expected: str) -> None:
    ended = CliRunner().invoke(cli, ["mutate", module, "--by", judge])
    assert isinstance(ended.exception, ConfigError)
    assert expected in str(ended.exception)


def test_a_judge_that_never_ends_is_refused(folder: pathlib.Path) -> None:
    (folder / "check.py").write_text("import windows\nwhile True: pass\n")
    ended = mutate("--timeout", "1")
    assert "a judge that ends within --timeout 1" in str(ended.exception)


@pytest.mark.parametrize(
    "judge",
    [
        "python -c 'import windows; assert windows.first(3, 8) == 0'",
        "python -m windows_main",
        "pytest -q -p no:cacheprovider test_windows.py",
        "sh -c 'cd / && python3 {folder}/by_path.py'",
    ],
)
def test_the_edit_is_seen_however_the_module_is_loaded(judge: str, folder: pathlib.Path) -> None:
    (folder / "windows_main.py").write_text("from windows import first\nassert first(3, 8) == 0\n")
    (folder / "test_windows.py").write_text("import windows\ndef test(): assert windows.first(3, 8) == 0\n")
    (folder / "by_path.py").write_text(
        "import importlib.util, inspect\n"
        f"spec = importlib.util.spec_from_file_location('other', '{folder}/windows.py')\n"
        "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
        "assert module.first(3, 8) == 0\nassert 'tokens <= window' not in inspect.getsource(module)\n"
    )
    target = target_of("windows")
    by = Judge(target, judge.format(folder=folder), 30)
    assert {8, 9} & by.check().reached == {8}
    wrong, harmless, unreached = (
        next(edit for edit in target.edits() if edit.line == line and edit.old == old)
        for line, old in ((8, "0"), (5, "4"), (9, "0"))
    )
    assert by.try_edit(wrong).outcome == "killed"
    assert by.try_edit(harmless).outcome == "survived"
    assert by.try_edit(unreached) == Verdict(unreached.key, "not reached")


def test_another_sitecustomize_still_runs(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True\n")
    (folder / "check.py").write_text(CHECK + "assert customized\n")
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    assert Judge(target_of("windows.py"), "python check.py", 30).check().seen


def test_a_judge_that_passes_without_the_module_counts_for_nothing(folder: pathlib.Path) -> None:
    (folder / "check.py").write_text(
        "import os, sys\nif os.path.exists('been'): sys.exit()\nopen('been', 'w').close()\nimport windows\n"
        "windows.first(3, 8)\n"
    )
    target = target_of("windows.py")
    judge = Judge(target, "python check.py", 30)
    judge.check()
    assert judge.try_edit(next(edit for edit in target.edits() if edit.line == 7)).outcome == "not imported"


def test_an_interrupt_says_what_was_found_and_ends_the_judge(folder: pathlib.Path) -> None:
    (folder / "check.py").write_text(
        "import os, time, windows\n"
        "if windows.first(16, 8) != 2:\n"  # the third edit is the first of which this is so
        "    open('asleep', 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "hkv", "mutate", "windows.py", "--by", "python check.py", "--json", "found.json"]
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        asleep = folder / "asleep"
        while not (asleep.exists() and asleep.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "hkv: interrupted\n")
    judged = json.loads((folder / "found.json").read_text())["judged"]
    assert output.splitlines()[-1].endswith(f", {13 - judged} left" if judged else "no edit of 13 judged")
    with pytest.raises(ProcessLookupError):
        os.kill(int(asleep.read_text()), 0)
