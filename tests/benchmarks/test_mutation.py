"""Campaigns of `benchmarks/mutation.py`: what they name is there, and the page has every survivor and its reason."""

from __future__ import annotations

import pathlib
import re
import tomllib

from benchmarks import mutation

ROOT = pathlib.Path(__file__).parents[2]
EXPLAINED = tomllib.loads(mutation.EXPLAINED.read_text("utf-8"))
PAGE = (ROOT / "docs" / "mutation.md").read_text("utf-8")


def test_modules_and_tests_are_there() -> None:
    for campaign in mutation.CAMPAIGNS:
        assert (ROOT / campaign.module).is_file()
        assert next(iter(campaign.trials(sample=True)))[0] == campaign.module
        for sample in (True, False):
            trials = list(campaign.trials(sample))
            assert campaign.module in [module for module, _ in trials]
            paths = {path for _, judge in trials for path in re.findall(r"tests/\S+", judge)}
            assert all((ROOT / path).exists() for path in paths), paths


def test_the_page_has_every_campaign_and_every_reason() -> None:
    modules = [campaign.module for campaign in (*mutation.CAMPAIGNS, mutation.IN_VLLM)]
    assert re.findall(r"^\| `([\w./]+)` \| `[^`]+` \| \d", PAGE, re.MULTILINE) == modules
    rows = {
        f"| `{module}` | {edit} | {why} |" for module, reasons in EXPLAINED.items() for edit, why in reasons.items()
    }
    table = PAGE[PAGE.index("| module | not noticed | why |") : PAGE.index(mutation.END)]
    assert set(table.splitlines()[2:]) == rows


def test_a_survivor_that_nothing_explains_is_shown() -> None:
    verdict = {"function": "f", "old": "<", "new": "<=", "outcome": "survived", "seconds": 1.0}
    made = {"module": "m.py", "judge": "j", "edits": 9, "judged": 3, "noticed": 1}
    made["verdicts"] = [verdict, verdict | {"outcome": "killed"}, verdict | {"outcome": "not reached"}]
    assert mutation._row(made) == "| `m.py` | `j` | 9 | 3 | 2 | 1 | 50 % | 3 |"
    assert list(mutation._survivors(made, {})) == [("f: `<` -> `<=`", "")]
    assert list(mutation._tables([made], {}))[-1] == "| `m.py` | f: `<` -> `<=` | **not explained** |"
