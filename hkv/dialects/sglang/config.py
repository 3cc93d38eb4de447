"""Configuration of a cache under SGLang's rules: its pools, its window, and the options that decide which stays.

SGLang has one `UnifiedRadixCache` for every model; what its layers cache are the tree's *components*. A model with full
attention alone has FULL; layers with a sliding window add SWA, with a pool of slots of its own and a mapping from the
one to the other; recurrent layers add MAMBA, with a pool of states. Sizes are in tokens, but for states: a slot holds
one token, and a page is `page_size` slots that are handed out together.
"""

from __future__ import annotations

import dataclasses
import math

from hkv.contract.bugs import Bug, check_bugs, listed
from hkv.errors import ConfigError

FULL, SWA, MAMBA = COMPONENTS = ("FULL", "SWA", "MAMBA")
"""SGLang's `ComponentType`, in the order in which components are asked."""

POLICIES = ("lru", "lfu", "fifo", "filo", "mru", "slru", "priority")
"""`--radix-eviction-policy`: the order in which leaves leave."""

SLIDE_EVERY = 128
"""Tokens after which a window slides (`SGLANG_SWA_EVICTION_INTERVAL`)."""

STATE_CHUNK, TRACK_EVERY = 64, 256
"""Tokens between states that a kernel of recurrent layers can keep (`mamba_chunk_size`, for models that name none), and
between those that are kept of decoded tokens (`--mamba-track-interval`)."""

STATES_A_REQUEST, STATES_UNTRACKED = 5, 3
"""States that a running request is counted with, tracked or not: what bounds how many run (`resolve_max_num_reqs`)."""

SPLIT_TOUCHES_SUFFIX, DECODE_LOSES_PAGE = "split-touches-suffix", "decode-loses-page"
STRANDS_FULL, WINDOW_UNTOLD = "window-pressure-strands-full-slots", "window-leaves-untold"

BUGS = listed(
    Bug(
        name=SPLIT_TOUCHES_SUFFIX,
        engine="SGLang 0.5.23 UnifiedTreeCore._split_node",
        contract="what nobody asked for keeps its place in the order of eviction",
        behaviour="a match that ends inside a node makes the rest of it the most recently used leaf: prompts entered "
        "later are evicted before it",
    ),
    Bug(
        name=DECODE_LOSES_PAGE,
        engine="SGLang 0.5.23 SWATokenToKVPoolAllocator.alloc_decode",
        contract="an allocation that is refused changes nothing",
        behaviour="the full pool's page is taken before the window's pool is asked; when that refuses, it is lost",
    ),
    Bug(
        name=STRANDS_FULL,
        engine="SGLang 0.5.23 UnifiedTreeCore._iteratively_delete_tombstone_ancestors",
        contract="full slots leave with the last node behind them that a request could resume at",
        behaviour="a tombstone whose last child leaves for the window's sake stays: no request can resume at it, and "
        "its full slots are taken until full attention itself runs short",
    ),
    Bug(
        name=WINDOW_UNTOLD,
        engine="SGLang 0.5.23 SWAComponent and MambaComponent",
        contract="who follows the events of a cache knows what every component of it has",
        behaviour="events tell of full attention's pages; window slots and states come and go untold, and routers send "
        "requests to prefixes of which nothing can be hit",
    ),
)
"""Defects of SGLang 0.5.23's cache."""


@dataclasses.dataclass(frozen=True)
class SGLangConfig:
    """Configuration of one cache.

    Attributes:
      page_size: tokens of a page (`--page-size`).
      num_slots: tokens of the full pool, and of the window's where there is one; whole pages.
      window: tokens that a sliding window reads, None where no layer has one.
      policy: one of `POLICIES`.
      eagle: whether keys are bigrams, as EAGLE's draft reads them.
      need_sort: whether freed pages wait and are sorted before they are handed out, as under disaggregation.
      states: states of recurrent layers, None where no layer has one.
      tracked: whether a request keeps states of lengths that it has passed (`--mamba-scheduler-strategy extra_buffer`),
        in two states besides its own, so that pages may be longer than a token; else only the last one is known.
      most_states: most states on the path to the one that was entered last; -1 for any number.
      bugs: names of defects that are reproduced.
    """

    page_size: int
    num_slots: tuple[int, ...]
    window: int | None = None
    policy: str = "lru"
    eagle: bool = False
    need_sort: bool = False
    states: int | None = None
    tracked: bool = False
    most_states: int = -1
    bugs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError("page_size", self.page_size, "at least 1 token")
        pools = 1 if self.window is None else 2
        if len(self.num_slots) != pools:
            raise ConfigError("num_slots", list(self.num_slots), f"{pools} sizes, one a pool")
        for size in self.num_slots:
            if size < self.page_size or size % self.page_size:
                raise ConfigError("num_slots", size, f"whole pages of {self.page_size} tokens, one at least")
        if self.window is not None and self.window < 1:
            raise ConfigError("window", self.window, "at least 1 token")
        if self.policy not in POLICIES:
            raise ConfigError("policy", self.policy, f"one of {', '.join(POLICIES)}")
        if self.states is not None and self.states < 1:
            raise ConfigError("states", self.states, "at least 1")
        if self.states is not None and not self.tracked and self.page_size > 1:
            raise ConfigError("page_size", self.page_size, "1 token, where only the last state is known")
        if self.most_states < -1 or self.most_states == 0:
            raise ConfigError("most_states", self.most_states, "a positive number, or -1")
        check_bugs(self.bugs, BUGS)

    @property
    def components(self) -> tuple[str, ...]:
        """The tree's components."""
        present = (True, self.window is not None, self.states is not None)
        return tuple(name for name, there in zip(COMPONENTS, present, strict=True) if there)

    @property
    def state_grid(self) -> int:
        """Tokens of a prompt, from where a pass begins, between states that it can keep (`mamba_checkpoint_grid`)."""
        return math.lcm(max(STATE_CHUNK, self.page_size), self.page_size)

    @property
    def track_interval(self) -> int:
        """Tokens of a sequence between states that are kept while it is decoded (`mamba_track_grid`)."""
        return math.lcm(self.state_grid, TRACK_EVERY)

    @property
    def most_running(self) -> int | None:
        """Requests that states suffice for, however they come; None where there are none."""
        each = STATES_A_REQUEST if self.tracked else STATES_UNTRACKED
        return None if self.states is None else self.states // each

    @property
    def bigrams(self) -> bool:
        """True if keys are bigrams: under EAGLE, but for caches with states."""
        return self.eagle and self.states is None
