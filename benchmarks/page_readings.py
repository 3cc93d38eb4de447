"""Defects planted in vLLM, from `hkv diff --html` to the cause on the page: what has to be pressed to see it.

    python -m benchmarks.page_readings make FOLDER    # where vLLM 0.33.0 is installed: plants each, and writes its page
    python -m benchmarks.page_readings read FOLDER    # where Playwright and Chromium are: reads them, prints the table

A reading is done without knowledge of the defect: the page opens at its first mark, `n` goes on to the
next one, a link of the panel leads to a block. It fails unless the words that name the cause, or an effect where the
engine stops by itself, stand in the panel after that and not before the last thing that was pressed.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
import sys

from tests.page.browser import launched, opened, settled

PACKAGE = "vllm"


@dataclasses.dataclass(frozen=True)
class Reading:
    """One defect of `tests/mutants/rows/vllm.toml`.

    Attributes:
      name: the defect.
      feature: feature of the traffic.
      pressed: keys, and texts of links of the panel, in order.
      shows: words that stand in the panel then, as a regular expression.
      what: `cause` or `effect`.
    """

    name: str
    feature: str
    pressed: tuple[str, ...]
    shows: str
    what: str = "cause"


READINGS = (
    Reading("shared-block-freed", "core", (), r"block 1: given back by r4.*IN THE FREE LIST while it is held"),
    Reading("hit-stays-in-the-queue", "steered", (), r"adopted by r12.*IN THE FREE LIST while it is held"),
    Reading("wrong-hash-for-a-block", "core", (), r"key 57732c725bb170d5 stands for 2 different prefixes"),
    Reading("window-retired-early", "core", (), r"lost a block of \[0, 1\], though all of its tokens are read"),
    Reading("cached-count-survives-preemption", "core", (), r"0 blocks of group 0 are registered, not 1.*preempted"),
    Reading("head-of-the-prefix-goes-first", "core", (), r"the queue is \[1, 2\], not \[2, 1\]"),
    Reading("nothing-left-to-compute", "core", (), r"a hit of 24 tokens is not below the request's length"),
    Reading("latest-duplicate", "core", (), r"r5 finds block 2 .* not block 1, which has its key"),
    Reading("eagle-drop-forgotten", "eagle", (), r"tokens 6 to 11: .* proves the draft layer's last value"),
    Reading(
        *("key-stays-when-a-block-is-reused", "core", ("block 2",)),
        *(r"line 5 allocate r1: handed out to r1, group 2, column 1; its key \w+ went", "effect"),
    ),
)


def make(folder: pathlib.Path) -> None:
    """Plants each defect, and writes the page of the difference that is found."""
    from hkv.cli.html import difference_case, write_page
    from hkv.oracle.comparison import Comparison
    from hkv.oracle.record import Only
    from hkv.testing.planting import applied
    from tests.mutants.catalogue import IN_PACKAGES

    rows = {row.name: row for row in IN_PACKAGES[PACKAGE]}
    for reading in READINGS:
        edits = rows[reading.name].edits
        for edit in edits:
            importlib.import_module(edit.target.partition(":")[0])
        with applied(*edits):
            comparison = Comparison((PACKAGE, "numpy"), Only(), 1)
            assert any(comparison.seed(reading.feature, seed) for seed in range(12)), reading.name
            found = comparison.differences(True)
            cases = [difference_case(each, comparison.factories(each), "exact") for each in found]
        write_page(str(folder / f"{reading.name}.html"), f"hkv diff: {reading.name}", cases)


def read(folder: pathlib.Path) -> None:
    """Reads each page in a browser, and prints a table in Markdown."""
    print("| planted in vLLM 0.33.0 | lines | pressed | what the panel says then | it is |\n|---|---|---|---|---|")
    with importlib.import_module("playwright.sync_api").sync_playwright() as play:
        browser = launched(play)
        for reading in READINGS:
            with opened(browser, folder / f"{reading.name}.html") as page:
                texts = [page.inner_text("#panel")]
                for press in reading.pressed:
                    if len(press) == 1:
                        page.keyboard.press(press)
                    else:
                        page.locator("#panel button.link", has_text=press).first.click()
                    settled(page)
                    texts.append(page.inner_text("#panel"))
                found = [re.search(reading.shows, text) for text in texts]
                assert found[-1] is not None, f"{reading.name}: {reading.shows}"
                assert not any(found[:-1]), f"{reading.name}: less has to be pressed"
                lines = page.evaluate("hkv.cases[0].count + 1")
            pressed = ", ".join(f"`{press}`" for press in reading.pressed) or "nothing"
            print(f"| `{reading.name}` | {lines} | {pressed} | {found[-1][0]} | {reading.what} |")


if __name__ == "__main__":
    {"make": make, "read": read}[sys.argv[1]](pathlib.Path(sys.argv[2]))
