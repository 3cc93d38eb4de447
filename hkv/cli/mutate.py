"""`hkv mutate`: one-token edits of a module, and a command that has to notice each."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import random
from typing import Any

import click

from hkv.cli.options import command_of
from hkv.cli.output_option import Reported, talks, write_json
from hkv.cli.progress import interruption, progress_bar
from hkv.contract.options import COUNT, SECONDS, SEED, argument, option
from hkv.testing.mutation.edits import Edit
from hkv.testing.mutation.trials import EditTarget, Judge, Verdict, VerdictFile, killed, target_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MutateOptions(Reported):
    module: str = argument(metavar="MODULE[:CLASS]")
    judge: str = option(
        None, "--by", required=True, metavar="COMMAND", help="The judge, which passes with exit status 0."
    )
    sample: int | None = option(metavar="N", type=COUNT, help="Try N edits, drawn at random.")
    seed: int = option(0, type=SEED, help="For --sample.")
    timeout: float | None = option(
        type=SECONDS,
        help="Seconds of processor time that a judge may use, and ten times as many by the clock.  [default: five "
        "times what it uses on unedited code, and 30]",
    )
    state: str | None = option(
        metavar="F", type=click.Path(), help="Keep verdicts in the file F, and begin with those in it."
    )
    listing: bool = option(False, "--list", help="Only list the edits.")


@command_of("mutate", _MutateOptions)
def command(given: _MutateOptions) -> int | None:
    """Make one-token edits of a module, a class or a function, one at a time, and see which of them a judge notices.

    MODULE is an import name or the path of a Python file. Edits are made in memory, in the judge's own processes;
    nothing is written where the module lies. The judge runs once on unedited code first, and has to pass, and to import
    the module. `hkv`, `pytest` and `python` are run by the interpreter of this command. `pytest -x` saves time.

    Exit status: 0 every edit that was tried is noticed, 1 some are not, 2 unusable input.

    \b
    Example:
      hkv mutate my_cache/manager.py:Manager --by 'pytest -x -q tests/test_manager.py'
      hkv mutate vllm.v1.core.block_pool --by 'hkv diff --engines vllm,numpy --seeds 5' --sample 40 --state trials.jsonl
    """
    target, json_path = target_of(given.module), given.json_path
    every = target.edits()
    chosen = _drawn(every, given.sample, given.seed)
    if given.listing:
        for edit in chosen:
            click.echo(_line(target, edit, edit.kind))
        write_json(json_path, {"edits": [_edit(edit) for edit in chosen]})
        return None
    by = Judge(target, given.judge, given.timeout)
    kept = VerdictFile(None if given.state is None else pathlib.Path(given.state), target, given.judge)
    seed = given.seed if len(chosen) < len(every) else None
    report = _Report(target, given.judge, every, chosen, kept, json_path, seed)
    left = [edit for edit in chosen if edit.key not in kept.verdicts]
    with interruption().saying(report.tell), progress_bar("trying", len(left)) as advance:
        if left:
            by.check()
        for edit in left:
            kept.add(by.try_edit(edit))
            advance()
    report.tell()
    return killed(report.verdicts()) != len(chosen)


def _drawn(every: list[Edit], sample: int | None, seed: int) -> list[Edit]:
    if sample is None or sample >= len(every):
        return every
    return [every[index] for index in sorted(random.Random(seed).sample(range(len(every)), sample))]


def _edit(edit: Edit) -> dict[str, Any]:
    fields = ("line", "column", "function", "kind", "old", "new")
    return {name: getattr(edit, name) for name in fields}


def _line(target: EditTarget, edit: Edit, said: str) -> str:
    place = f"{os.path.relpath(target.path)}:{edit.line}:{edit.column}"
    return f"{said:17} {place}  {edit.function or 'module'}  {edit.described}"


@dataclasses.dataclass(frozen=True)
class _Report:
    """Prints what is known, and writes it."""

    target: EditTarget
    judge: str
    every: list[Edit]
    chosen: list[Edit]
    kept: VerdictFile
    json_path: str | None
    seed: int | None

    def verdicts(self) -> list[Verdict]:
        """Those of the edits that were chosen."""
        return [self.kept.verdicts[edit.key] for edit in self.chosen if edit.key in self.kept.verdicts]

    def tell(self) -> None:
        """Prints the edits that were not noticed, and the score."""
        judged = [(edit, self.kept.verdicts[edit.key]) for edit in self.chosen if edit.key in self.kept.verdicts]
        noticed = killed(self.verdicts())
        if talks(self.json_path):
            for edit, verdict in judged:
                if verdict.outcome not in ("killed", "timed out"):
                    click.echo(_line(self.target, edit, verdict.outcome))
            click.echo(f"{self.target.name}: {self._score(len(judged), noticed)}")
        document = {
            "module": self.target.name,
            "file": str(self.target.path),
            "judge": self.judge,
            "edits": len(self.every),
            "seed": self.seed,
            "judged": len(judged),
            "noticed": noticed,
            "verdicts": [
                _edit(edit) | {name: getattr(verdict, name) for name in ("outcome", "status", "said", "seconds")}
                for edit, verdict in judged
            ],
        }
        write_json(self.json_path, document)

    def _score(self, judged: int, noticed: int) -> str:
        if not judged:
            return f"no edit of {len(self.every)} judged"
        drawn = "" if self.seed is None else f", drawn with seed {self.seed} from {len(self.every)},"
        missing = f", {len(self.chosen) - judged} left" if judged < len(self.chosen) else ""
        others = collections.Counter(verdict.outcome for verdict in self.verdicts())
        told = [f"{number} {outcome}" for outcome, number in sorted(others.items()) if outcome != "killed"]
        score = f"{noticed} of {judged} edits{drawn} noticed ({100 * noticed / judged:.0f}%)"
        return f"{score}{''.join(f', {text}' for text in told)}{missing}"
