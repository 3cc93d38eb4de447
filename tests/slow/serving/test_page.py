"""`docs/serving.md`: its code runs, and serves with hits, in debug mode, through a tier and for a kernel."""

from __future__ import annotations

from tests.test_documents import run_page


def test_the_code_of_the_page_runs() -> None:
    run_page("serving")
