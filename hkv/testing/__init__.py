"""Testing hybrid caches: invariants after every operation, Hypothesis strategies, a state machine, a pytest fixture.

- `Watch`: an engine under every invariant of its dialect; `run_watched`: random traffic through it;
- `engine_machine`: a Hypothesis state machine that drives an engine by rules (extra `testing`);
- `strategies`: configurations, topologies, specs and cached sets that shrink (extra `testing`);
- the pytest plugin `hkv.testing.plugin`, found by itself where HKV is installed: the fixture `hkv_run_watched`.

Each is imported when it is first used. `docs/api.md` shows them; the other modules here are internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv._lazy import loader

if TYPE_CHECKING:
    from hkv.testing import strategies
    from hkv.testing.state_machine import engine_machine
    from hkv.testing.watched import Watch, run_watched

__all__ = ["Watch", "engine_machine", "run_watched", "strategies"]

__getattr__ = loader(
    __name__,
    {
        "hkv.testing.state_machine": "engine_machine",
        "hkv.testing.strategies": "strategies",
        "hkv.testing.watched": "Watch run_watched",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
