"""Scores of test suites under `hkv mutate` (docs/explore.md): HKV's own, a toy engine's, and `hkv diff` on vLLM.

With `--sample` a module of each room is edited in places drawn at random, in minutes. Without it every module of every
room is edited everywhere and judged by all tests of its room, which takes many cores a night. Verdicts are kept in
FOLDER, and a second run begins with them.

Example: python benchmarks/mutation.py /tmp/verdicts --sample --markdown docs/explore.md
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import click

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXPLAINED = ROOT / "benchmarks" / "mutation_survivors.toml"
"""Reasons why edits live, a table a module: `"function: edit" = "reason"`."""

BEGIN, END = "<!-- scores -->\n", "<!-- end -->"
SEED = 0
SHORT, LONG = "150", "3600"
"""Seconds of a trial, whose programs are compiled anew, in the sample and by all tests of a room."""

NOTICED = ("killed", "timed out")


@dataclasses.dataclass(frozen=True)
class Campaign:
    """A room of modules.

    Attributes:
      module: the one of the sample; the others lie in the same folder.
      edits: how many of its edits the sample has.
      near: tests, or a command, that judge it in the sample.
      all: tests that judge the whole folder; None for a module that is judged by itself, by `near`.
    """

    module: str
    edits: int
    near: str
    all: str | None = None

    def trials(self, sample: bool) -> Iterator[tuple[str, str]]:
        """Modules and their judges."""
        if sample or self.all is None:
            yield self.module, _judge(self.near)
            return
        for path in sorted((ROOT / self.module).parent.rglob("*.py")):
            if path.name != "__init__.py":
                yield str(path.relative_to(ROOT)), _judge(self.all)


def _judge(tests: str) -> str:
    return f"pytest -x -q -n 0 {tests}" if tests.startswith("tests/") else tests


TOY = "examples/toy_engine.py"
OF_TOY = "--kinds full_attention --max-groups 1 --version 1 --feature core --seeds 20 --no-shrink"
EXAMPLES = "tests/examples/test_checking_your_engine.py"

CAMPAIGNS = (
    Campaign(
        "hkv/layout/strided.py", 20, "tests/layout/test_content.py tests/layout/test_addresses.py", "tests/layout"
    ),
    Campaign(
        "hkv/chunks/kernel_groups.py", 14, "tests/chunks/test_vectors.py tests/chunks/test_formats.py", "tests/chunks"
    ),
    Campaign(
        "hkv/serving/scheduler.py", 8, "tests/serving -k 'chunks_end or preempt'", "tests/serving tests/slow/serving"
    ),
    Campaign("hkv/state/free_queue.py", 6, "tests/state/test_pool.py", "tests/state tests/cache"),
    Campaign("hkv/cache/arrivals.py", 4, "tests/step/test_arrivals.py", "tests/cache tests/step tests/slow/step"),
    Campaign("hkv/paged/words.py", 3, "tests/paged/test_operations.py", "tests/paged"),
    Campaign(
        "hkv/dialects/vllm/rules/finders.py",
        6,
        "tests/cache/test_keyed.py",
        "tests/cache tests/kinds tests/slow/test_cache.py",
    ),
    Campaign(
        "reference/dialects/rtp_llm/lists.py",
        6,
        "tests/rtp_llm/test_witness.py",
        "tests/rtp_llm tests/slow/rtp_llm",
    ),
    Campaign(TOY, 40, f"hkv diff --engines {TOY}:ToyEngine,numpy {OF_TOY}"),
    Campaign(TOY, 6, f"{EXAMPLES} -k 'python_that or state_machine'"),
)
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
IN_VLLM = Campaign(MANAGERS, 26, "hkv diff --engines numpy,vllm --seeds 4 --no-shrink")


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=pathlib.Path))
@click.option("--sample", is_flag=True, help="One module a room, in a few places.")
@click.option("--only", metavar="TEXT", default="", help="Modules with this in their names.")
@click.option("--vllm-python", metavar="PATH", help="With vLLM 0.33.0: its managers as well.")
@click.option(
    "--markdown", metavar="F", type=click.Path(path_type=pathlib.Path), help="Put the tables into the file F."
)
def command(
    folder: pathlib.Path, sample: bool, only: str, vllm_python: str | None, markdown: pathlib.Path | None
) -> None:
    """Edit modules and judge the edits; exit status 1 if one lives that nothing explains."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(each, trial, sys.executable) for each in CAMPAIGNS for trial in each.trials(sample)]
    if vllm_python is not None:
        jobs += [(IN_VLLM, trial, vllm_python) for trial in IN_VLLM.trials(sample)]
    found = []
    for number, (campaign, (module, judge), python) in enumerate(jobs):
        if only in module:
            drawn = ["--timeout", SHORT if sample else LONG]
            drawn += ["--sample", str(campaign.edits), "--seed", str(SEED)] if sample else []
            path = folder / f"{number}-{module.replace('/', '.')}"
            found.append(_judged(module, judge, python, path, drawn))
            print(_row(found[-1]), flush=True)
    explained = tomllib.loads(EXPLAINED.read_text("utf-8"))
    left = [(made["module"], edit) for made in found for edit, why in _survivors(made, explained) if not why]
    if markdown is not None:
        page = markdown.read_text("utf-8")
        start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
        markdown.write_text(page[:start] + "\n".join(_tables(found, explained)) + "\n" + page[end:], "utf-8")
    for module, edit in left:
        print(f"not explained: {module}: {edit}")
    sys.exit(1 if left else 0)


def _judged(module: str, judge: str, python: str, path: pathlib.Path, drawn: Sequence[str]) -> dict[str, Any]:
    """The result of `hkv mutate`, as its `--json` has it."""
    files = ["--state", f"{path}.jsonl", "--json", f"{path}.json"]
    command = [python, "-m", "hkv", "mutate", module, "--by", judge, *drawn, *files]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"HKV_HYPOTHESIS_PROFILE": "judge"})
    if done.returncode not in (0, 1):
        sys.exit(f"{module}: exit status {done.returncode}")
    return json.loads(pathlib.Path(f"{path}.json").read_text("utf-8"))


def _row(made: dict[str, Any]) -> str:
    counts = collections.Counter(one["outcome"] for one in made["verdicts"])
    seconds = sum(one["seconds"] for one in made["verdicts"])
    reached = made["judged"] - counts["not reached"]
    share = f"{100 * made['noticed'] / reached:.0f} %" if reached else "-"
    numbers = (made["edits"], made["judged"], reached, made["noticed"], share, f"{seconds:.0f}")
    judge = made["judge"].removeprefix("pytest -x -q -n 0 ").replace("|", "\\|")
    return f"| `{made['module']}` | `{judge}` | {' | '.join(map(str, numbers))} |"


def _survivors(made: dict[str, Any], explained: dict[str, dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Edits that the judge runs and does not notice, and why."""
    for one in made["verdicts"]:
        if one["outcome"] not in (*NOTICED, "not reached"):
            old, new = (" ".join(one[name].split()) for name in ("old", "new"))
            name = f"{one['function']}: `{old}` -> `{new}`"
            yield name, explained.get(made["module"], {}).get(name, "")


def _tables(found: Sequence[dict[str, Any]], explained: dict[str, dict[str, str]]) -> Iterator[str]:
    yield "| module | judge | edits | tried | reached | noticed | of those reached | seconds |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    yield from map(_row, found)
    yield ""
    yield "| module | not noticed | why |"
    yield "|---|---|---|"
    for made in found:
        for edit, why in _survivors(made, explained):
            yield f"| `{made['module']}` | {edit} | {why or '**not explained**'} |"


if __name__ == "__main__":
    command()
