"""Serving experiments inside `jit`: one value from a plan to the cache, its pool and its block tables.

`from_plan` or `from_config` make a `Serving`. A turn is `step`, then for each layer `write` and `attend`, or
`read_state` and `write_state`; `arrive` and `finish` stand between turns, `schedule` says what a turn computes, `save`
and `restore` keep it all in a file. All but those two, and the first two, are pure functions on one pytree
(`docs/serving.md`).
"""

from hkv.serving.files import restore, save
from hkv.serving.pages import LayerPages
from hkv.serving.scheduler import Plan, schedule, victim
from hkv.serving.serving import (
    Serving,
    Turn,
    arrive,
    attend,
    finish,
    from_config,
    from_plan,
    gather,
    read_state,
    step,
    write,
    write_state,
)

__all__ = [
    "LayerPages",
    "Plan",
    "Serving",
    "Turn",
    "arrive",
    "attend",
    "finish",
    "from_config",
    "from_plan",
    "gather",
    "read_state",
    "restore",
    "save",
    "schedule",
    "step",
    "victim",
    "write",
    "write_state",
]
