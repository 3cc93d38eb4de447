"""SGLang's rules in two forms, in one process: the text run plainly, and the text lowered.

  python -m benchmarks.sglang_text --requests 6000 --pages 4000
  python -m benchmarks.sglang_text --programs    # compiles the text for several configurations, and runs nothing

Requests of 34 pages, of which 16 are shared, under the plain schedule of replays, over full attention and a window of
16 slots; what the schedule asks of the cache is noted, and performed again, in one dispatch. A page operation is a page
of one pool through match, allocation, insertion and release, as in `benchmarks/sglang_cache.py`. Times are processor
time, the least and the median of the turns; compiling is told apart. All arrays of the lowered text are those of the
plain one.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import click
import jax
import numpy as np

from benchmarks.sglang_cache import SCHEDULE, header_of, operations_of, shared_prompts
from hkv.dialects.sglang.batches import LAYOUT, empty_state, program
from hkv.dialects.sglang.config import SGLangConfig
from hkv.dialects.sglang.plain import settings
from hkv.dialects.sglang.replay_command import SGLangLoop
from hkv.machine import native_loops
from hkv.replay.schedule import Recorder
from reference.dialects.sglang.operations import perform_all
from tests.sglang.batches import Noted, differing

WINDOW = 16
"""Slots of the window."""


@click.command()
@click.option("--requests", default=1000, show_default=True, help="How many requests.")
@click.option("--pages", default=1000, show_default=True, help="Pages of each pool.")
@click.option("--turns", default=5, show_default=True, help="Turns.")
@click.option("--programs", is_flag=True, help="Programs of several configurations alone: what they cost to make.")
def main(requests: int, pages: int, turns: int, programs: bool) -> None:
    """SGLang's rules in two forms."""
    native_loops.enable()
    if programs:
        made()
        return
    header, arrivals = header_of((pages, pages), WINDOW), shared_prompts(requests)
    noted = Noted(header)
    SGLangLoop(noted, 1, SCHEDULE, arrivals, Recorder(2 * pages + 1, None, lambda: None)).run()
    work = operations_of(arrivals)
    click.echo(f"{len(noted.batch)} operations, {work} page operations, {noted.evictions} evictions")
    once = by_text(noted, work)
    spent = [once() / work * 1e9 for _ in range(turns)]
    click.echo(f"lowered: least {min(spent):.1f}, median {float(np.median(spent)):.1f} ns a page operation")


def made() -> None:
    """Compiles the text lowered for configurations that are known, and for any."""
    alone = SGLangConfig(page_size=16, num_slots=(16000,))
    window = dataclasses.replace(alone, num_slots=(16000, 16000), window=64)
    configs = {
        **{"full attention": alone, "a window beside it": window},
        "states beside both": dataclasses.replace(window, states=100, tracked=True),
        "any configuration": None,
    }
    for name, config in configs.items():
        sizes = {"keys": 4096, "requests": 16, "row": 256, "operations": 4096, "payload": 4096}
        state = empty_state(config or window, known=config is not None, **sizes)
        _compiled(name, program(config), state, np.int32(1))


def by_text(noted: Noted, work: int) -> Callable[[], float]:
    """The text, run plainly once, and lowered with the configuration known."""
    state, count = noted.state(), len(noted.batch)
    cache = LAYOUT.restored({**state, "config.alone": 0})
    begun = time.process_time()
    perform_all(cache, count)
    click.echo(f"plainly: {(time.process_time() - begun) / work * 1e9:.0f} ns a page operation")
    want, known = LAYOUT.arrays_of(cache), settings(noted.config)
    arrays = {name: array for name, array in state.items() if name not in known}
    compiled = _compiled("lowered", program(noted.config), arrays, np.int32(count))

    def once() -> float:
        given = jax.block_until_ready(jax.device_put(arrays))
        begun = time.process_time()
        after = jax.block_until_ready(compiled(given, np.int32(count)))
        spent = time.process_time() - begun
        assert differing(jax.device_get(after), want) == []
        return spent

    return once


def _compiled(name: str, program: Any, *arguments: Any) -> Any:
    begun = time.process_time()
    traced = program.lower(*arguments)
    between = time.process_time()
    compiled = traced.compile()
    text, now = compiled.as_text(), time.process_time()
    copies = len(re.findall(r"= s32\[\d{2,}\]\S* copy\(", text))
    click.echo(
        f"{name}: traced in {between - begun:.1f}, compiled in {now - between:.1f} s; {text.count(' while(')} loops, "
        f"{text.count(' conditional(')} segments, {text.count(chr(10))} lines, {copies} copies of arrays"
    )
    return compiled


if __name__ == "__main__":
    main()
