"""Draws the screenshots of docs/look.md: python docs/pictures/draw_pages.py, where Playwright and Chromium are."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
import tempfile

from tests.page.browser import launched, opened, settled

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
SIZE = {"width": 1180, "height": 620}
COMMANDS = (
    "diff --engines examples/wrong_engine.py:WrongEngine,numpy --kinds full_attention --max-groups 1 --version 1 "
    "--feature core --seeds 1 --html difference.html",
    "check tests/data/oplogs/retention-94.jsonl --html log.html",
    "record --dialect rtp-llm/hybrid-pool --feature connector --seed 5 -o pools.jsonl --html pools.html",
    "trace chat -o chat.jsonl --requests 300 --seed 1 --tokens-per-id 16",
    "replay chat.jsonl --groups full:16,swa:16:1024,swa:16:128 --num-blocks 8000 --engine numpy --html replay.html",
)


def main() -> None:
    """Makes the pages and their pictures."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        for name in ("hkv", "reference", "pallas_kernels", "tests", "examples"):
            (folder / name).symlink_to(ROOT / name)
        for command in COMMANDS:
            subprocess.run([sys.executable, "-m", "hkv", *command.split()], cwd=folder, check=False)
        with importlib.import_module("playwright.sync_api").sync_playwright() as play:
            browser = launched(play)
            with opened(browser, folder / "difference.html", "#op=7&block=1", viewport=SIZE) as page:
                taken(page, "look-difference.png")
            with opened(browser, folder / "log.html", viewport=SIZE) as page:
                taken(page, "look-log.png")
            with opened(browser, folder / "pools.html", "#op=43&rows=requests", viewport=SIZE) as page:
                taken(page, "look-requests.png")
            with opened(browser, folder / "replay.html", viewport={**SIZE, "height": 800}, color_scheme="dark") as page:
                box = page.locator(".chart canvas >> nth=1").bounding_box()
                page.mouse.move(box["x"] + 600, box["y"] + 40)
                page.mouse.down()
                page.mouse.move(box["x"] + 700, box["y"] + 40, steps=3)
                page.mouse.up()
                taken(page, "look-replay.png")


def taken(page: object, name: str) -> None:
    """Writes a picture, in few colours where Pillow is there to choose them."""
    settled(page)
    page.screenshot(path=str(HERE / name))  # type: ignore[attr-defined]
    image = importlib.import_module("PIL.Image").open(HERE / name)
    image.convert("RGB").quantize(255).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
