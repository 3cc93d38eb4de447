"""Defects to plant in the compiled rules, each a change in one line, to see that exploring finds them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import MappingProxyType

from hkv.dialects.vllm import machine as cache
from hkv.testing.planting import Patch, applied

RULES = "hkv.dialects.vllm."
QUEUE = "hkv.state.free_queue:"

DEFECTS = MappingProxyType(
    {
        "window-one-short": Patch(
            f"{RULES}kinds.sliding_window:parameters",
            '"REACH": kept,',
            '"REACH": kept - 1,',
        ),
        "window-run-too-long": Patch(
            f"{RULES}rules.hit:_search",
            "jnp.maximum(query.need, 0) + drop, 1)",
            "jnp.maximum(query.need, 0) + 1, 1)",
        ),
        "hit-of-everything": Patch(
            f"{RULES}rules.hit:longest_hit", "jnp.maximum(tokens - 1, 0)", "jnp.maximum(tokens, 0)"
        ),
        "room-not-counted": Patch(
            f"{RULES}rules.admit:fits",
            "(total.estimate <= limit) & (demand.capped | (total.checked <= w.free))",
            "total.estimate <= limit + 1",
        ),
        "shared-block-freed": Patch(f"{QUEUE}release", "(references == -1)", "(references <= -1)"),
        "cached-blocks-first": Patch(
            f"{QUEUE}release", 'w.read("keys", w.key(block)) != 0', 'w.read("keys", w.key(block)) == 0'
        ),
        "adopted-block-stays-queued": Patch(
            f"{QUEUE}adopt", "jnp.where(queued, w.place(place - 1), w.queue.shape[0] - 1)", "w.queue.shape[0] - 1"
        ),
    }
)
"""Every defect, by name."""


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Lets the compiled rules have a defect until the block ends; None for none.

    Programs compiled before are forgotten on both ends.

    Raises:
      KeyError: there is no such defect.
    """
    if name is None:
        yield
        return
    with applied(DEFECTS[name]):
        cache.forget_programs()
        try:
            yield
        finally:
            cache.forget_programs()
