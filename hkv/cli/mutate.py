"""`hkv mutate`: one-token edits of a module, and a command that has to notice each."""

from __future__ import annotations

import collections
import os
import pathlib
import random
from typing import Any

import click

from hkv.cli.numbers import SECONDS
from hkv.cli.output_option import json_option, write_json
from hkv.cli.progress import interruption, progress_bar
from hkv.limits import MAX_COUNT, MAX_SEED
from hkv.testing.mutation.edits import Edit
from hkv.testing.mutation.trials import Judge, State, Target, Verdict, killed, target_of


@click.command("mutate")
@click.argument("module", metavar="MODULE[:CLASS]")
@click.option("--by", "judge", required=True, metavar="COMMAND", help="The judge, which passes with exit status 0.")
@click.option("--sample", metavar="N", type=click.IntRange(1, MAX_COUNT), help="Try N edits, drawn at random.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="For --sample.")
@click.option(
    "--timeout",
    type=SECONDS,
    help="Seconds of processor time that a judge may use, and ten times as many by the clock.  [default: five times "
    "what it uses on unedited code, and 30]",
)
@click.option(
    "--state", metavar="F", type=click.Path(), help="Keep verdicts in the file F, and begin with those in it."
)
@click.option("--list", "listing", is_flag=True, help="Only list the edits.")
@json_option
@click.pass_context
def command(
    context: click.Context,
    module: str,
    judge: str,
    sample: int | None,
    seed: int,
    timeout: float | None,
    state: str | None,
    listing: bool,
    json_path: str | None,
) -> None:
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
    target = target_of(module)
    every = target.edits()
    chosen = _drawn(every, sample, seed)
    if listing:
        for edit in chosen:
            click.echo(_line(target, edit, edit.kind))
        write_json(json_path, {"edits": [_edit(edit) for edit in chosen]})
        return
    by = Judge(target, judge, timeout)
    kept = State(None if state is None else pathlib.Path(state), target, judge)
    report = _Report(target, judge, every, chosen, kept, json_path, seed if len(chosen) < len(every) else None)
    left = [edit for edit in chosen if edit.key not in kept.verdicts]
    with interruption().saying(report.tell), progress_bar("trying", len(left)) as advance:
        if left:
            by.check()
        for edit in left:
            kept.add(by.try_edit(edit))
            advance()
    report.tell()
    context.exit(0 if killed(report.verdicts()) == len(chosen) else 1)


def _drawn(every: list[Edit], sample: int | None, seed: int) -> list[Edit]:
    if sample is None or sample >= len(every):
        return every
    return [every[index] for index in sorted(random.Random(seed).sample(range(len(every)), sample))]


def _edit(edit: Edit) -> dict[str, Any]:
    fields = ("line", "column", "function", "kind", "old", "new")
    return {name: getattr(edit, name) for name in fields}


def _line(target: Target, edit: Edit, said: str) -> str:
    place = f"{os.path.relpath(target.path)}:{edit.line}:{edit.column}"
    return f"{said:17} {place}  {edit.function or 'module'}  {edit.described}"


class _Report:
    """Prints what is known, and writes it."""

    def __init__(
        self,
        target: Target,
        judge: str,
        every: list[Edit],
        chosen: list[Edit],
        kept: State,
        json_path: str | None,
        seed: int | None,
    ) -> None:
        self._target, self._judge, self._every, self._chosen = target, judge, every, chosen
        self._kept, self._json_path, self._seed = kept, json_path, seed

    def verdicts(self) -> list[Verdict]:
        """Those of the edits that were chosen."""
        return [self._kept.verdicts[edit.key] for edit in self._chosen if edit.key in self._kept.verdicts]

    def tell(self) -> None:
        """Prints the edits that were not noticed, and the score."""
        judged = [(edit, self._kept.verdicts[edit.key]) for edit in self._chosen if edit.key in self._kept.verdicts]
        noticed = killed(self.verdicts())
        if self._json_path != "-":
            for edit, verdict in judged:
                if verdict.outcome not in ("killed", "timed out"):
                    click.echo(_line(self._target, edit, verdict.outcome))
            click.echo(f"{self._target.name}: {self._score(len(judged), noticed)}")
        document = {
            "module": self._target.name,
            "file": str(self._target.path),
            "judge": self._judge,
            "edits": len(self._every),
            "seed": self._seed,
            "judged": len(judged),
            "noticed": noticed,
            "verdicts": [
                _edit(edit) | {name: getattr(verdict, name) for name in ("outcome", "status", "said", "seconds")}
                for edit, verdict in judged
            ],
        }
        write_json(self._json_path, document)

    def _score(self, judged: int, noticed: int) -> str:
        if not judged:
            return f"no edit of {len(self._every)} judged"
        drawn = "" if self._seed is None else f", drawn with seed {self._seed} from {len(self._every)},"
        missing = f", {len(self._chosen) - judged} left" if judged < len(self._chosen) else ""
        others = collections.Counter(verdict.outcome for verdict in self.verdicts())
        told = [f"{number} {outcome}" for outcome, number in sorted(others.items()) if outcome != "killed"]
        score = f"{noticed} of {judged} edits{drawn} noticed ({100 * noticed / judged:.0f}%)"
        return f"{score}{''.join(f', {text}' for text in told)}{missing}"
