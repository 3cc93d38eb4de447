"""Request traces through SGLang's cache, token by token, as its scheduler asks of it.

A request takes what is cached and gets slots for a chunk; after each chunk it is entered, so that others find it. Then
tokens are decoded one by one, and the window slides every so many. The schedule, that is who runs when, is SGLang's,
or the one that `hkv replay` has for every dialect, so that what differs is the cache; with states it is that one alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hkv.contract.log import PlainHeader
from hkv.contract.options import Number, option
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS, STATES_A_REQUEST
from hkv.dialects.sglang.scheduler import POLICIES, SGLangLoop, SGLangScheduler
from hkv.dialects.sglang.traffic import FEATURES
from hkv.errors import ConfigError
from hkv.replay.agreement import compare
from hkv.replay.command import StudiedCache
from hkv.replay.plain import PlainCache, PlainReplayCommand
from hkv.replay.run import ReplayedCache
from hkv.replay.schedule import Schedule
from hkv.spec import spec_to_log

RATIO = 0.8
"""SGLang's `--swa-full-tokens-ratio`."""

REPLAY = "replay"
"""`--schedule-policy`: the schedule of `hkv replay` under every dialect, in place of SGLang's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangOptions:
    """An option of `hkv replay` that this dialect adds, and `hkv sweep` varies."""

    swa_full_tokens_ratio: float = option(
        RATIO, type=Number(0.001, 1000), help="SGLang: tokens of the window's pool as a share of the full pool's."
    )
    schedule_policy: str | None = option(
        type=(*POLICIES, REPLAY),
        help="SGLang: policy of its own scheduler; or the schedule that replays have under every dialect. "
        f"[default: {POLICIES[0]}; {REPLAY} where there are states]",
    )


class SGLangCache(PlainCache):
    """SGLang's cache, which the compiled schedule has, but not under SGLang's own scheduler."""

    def require_compiled(self) -> None:
        if self._loop is not SGLangLoop:
            expected = f"numpy: SGLang's scheduler has no compiled form (--schedule-policy {REPLAY} has one)"
            raise ConfigError("engine", "jax", expected)

    def changed(self, tokens: int, requests: int, schedule: Schedule) -> Mapping[str, ReplayedCache]:
        changed = super().changed(tokens, requests, schedule)
        if structs.to_config(self.config).states is None:
            return changed
        # Beside those that the tree keeps, a request that runs has states of its own.
        own = STATES_A_REQUEST * schedule.max_running
        return {
            change: self.sized([*cache.config.num_blocks[:-1], cache.config.num_blocks[-1] + own])
            for change, cache in changed.items()
        }

    def begun(self, schedule: Schedule, prepared: Any, check: bool) -> Any:
        from hkv.dialects.sglang.schedule import SGLangCompiledReplay

        # Replays that are compared have room for as many pages as the larger one, and so the same program.
        return SGLangCompiledReplay(structs.to_config(self.config), schedule, prepared, room=self.room)

    def compare_ends(self, running: Any, reference: Any, names: tuple[str, str]) -> None:
        compare("the cache's state", running.state(), reference.perform(structs.StateOp()), names)


class SGLangReplay(PlainReplayCommand):
    """Each pool by its pages, or all pages and the window's share of them; 0.5.23's defects are as they are, and states
    are tracked (`extra_buffer`), as by default."""

    cache = SGLangCache
    declared = SGLangOptions

    def __init__(self) -> None:
        super().__init__(SGLangLoop)

    def num_blocks(self, options: dict[str, Any]) -> Sequence[int]:
        blocks, kinds = options["num_blocks"], {spec.kind for spec in options["groups"]}
        if len(blocks) != 1 or structs.SLIDING_WINDOW not in kinds:
            return blocks
        full = max(1, min(blocks[0] - 1, round(blocks[0] / (1 + options["swa_full_tokens_ratio"]))))
        return full, blocks[0] - full

    def header(self, options: dict[str, Any]) -> PlainHeader:
        groups = [spec_to_log(spec) for spec in options["groups"]]
        header = structs.Header(
            dialect=options["dialect"],
            feature=FEATURES[0],
            num_blocks=list(self.num_blocks(options)),
            groups=groups,
            bugs=sorted(BUGS),
            tracked=any(group["kind"] == structs.STATES for group in groups),
        )
        structs.to_config(header)
        return header

    def of_groups(self, options: dict[str, Any]) -> StudiedCache:
        stateful = any(spec_to_log(spec)["kind"] == structs.STATES for spec in options["groups"])
        policy = options["schedule_policy"] or (REPLAY if stateful else POLICIES[0])
        self._loop = SGLangLoop if policy == REPLAY else functools.partial(SGLangScheduler, policy)
        return super().of_groups(options)
