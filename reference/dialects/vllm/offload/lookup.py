"""Longest prefix of a request that the second tier can complete, beyond what the GPU has of it.

Groups of full attention are asked for the chunks from the GPU's hit on, the others for the last ones that resuming at
the length found so far takes; whatever shortens it sends the search back. A chunk that is still being written counts,
but then the answer is to ask again later. vLLM 0.33 `OffloadingConnectorScheduler._lookup_complete_chunks`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hkv.dialects.vllm.offload.config import OffloadConfig
from hkv.dialects.vllm.offload.plain import Name as Key

Look = Callable[[Key], "bool | None"]
"""True if a chunk can be read, False while it is being written, None where it is absent."""


def external_hit(
    config: OffloadConfig,
    look: Look,
    keys: Sequence[Sequence[Key]],
    local: int,
    num_tokens: int,
    limit: int | None = None,
    loading: Collection[Key] = (),
) -> int | None:
    """Tokens beyond a request's hit on the GPU that can be loaded; None for: ask again later.

    Args:
      config: the cache and its tier.
      look: what the tier has.
      keys: of each group, the keys of the request's whole chunks, from its first token on.
      local: tokens of the hit on the GPU, whole scheduler blocks.
      num_tokens: tokens that the request has.
      limit: tokens that may be loaded; None for all.
      loading: keys that are being loaded for another request.
    """
    most = num_tokens if limit is None else min(num_tokens, local + limit)
    if config.windows:
        most -= 1
        if config.aligned:
            most -= most % config.chunk_tokens[config.aligned[0]]
    found = _Search(config, look, keys, local, limit is not None).length(most)
    if found and any(key in loading for key in chunks_of_hit(config, keys, local, local + found)):
        return None
    return found


class Prefixes(NamedTuple):
    """Prefixes of a request that a tail inside a block may end.

    Attributes:
      key: the key of a group's part of the prefix of so many tokens.
      prompt: tokens of its prompt.
      named: tokens up to which it has keys.
    """

    key: Callable[[int, int], Key]
    prompt: int
    named: int


def tail_hit(
    config: OffloadConfig,
    look: Look,
    keys: Sequence[Sequence[Key]],
    prefixes: Prefixes,
    local: int,
    found: int,
    limit: int | None = None,
    loading: Collection[Key] = (),
) -> tuple[int | None, int | None]:
    """Tokens beyond the hit on the GPU that can be loaded, None for: later; and the tail's end where they end in one.

    The longest tail counts, after the whole chunks or inside the block that follows them. A draft's tail is known by
    the prefix that proves it, which may take the chunk before the tail as well. vLLM 0.33
    `OffloadingConnectorScheduler._lookup`.

    Args:
      config: a cache whose tails are kept.
      look: what the tier has.
      keys: of each group, the keys of the request's whole chunks.
      prefixes: its prefixes.
      local: tokens of the hit on the GPU.
      found: tokens beyond them that whole chunks complete.
      limit: tokens that may be loaded; None for all.
      loading: keys that are being loaded for another request.
    """
    unit, size, whole = config.cache.hash_block_size, config.chunk_tokens[0], local + found
    groups = range(len(config.chunk_tokens))
    proof = max(map(config.proof, groups))
    most = min(prefixes.prompt, whole + size * (2 if proof else 1)) - 1
    most = min(most, prefixes.named - proof if proof else most, most if limit is None else local + limit)
    most -= most % unit
    between, later = whole // size, False
    beyond = (between + 1) * size
    if most >= beyond:
        bridge = [keys[group][between] for group in groups if group not in config.aligned]
        later = any(key in loading for key in bridge)
        for key in bridge:
            state = look(key)
            if state is None:
                most = beyond - unit
                break
            later |= not state
    waits = later
    for end in range(most, whole, -unit):
        there, absent = not (waits and end >= beyond), False
        for group in groups:
            state = look(prefixes.key(group, end + config.proof(group)))
            if state is None:
                absent = True
                break
            there &= state
        if there and not absent:
            return end - local, end
        later |= not there
    return (None if later and not found else found), None


def chunks_of_hit(config: OffloadConfig, keys: Sequence[Sequence[Key]], local: int, end: int) -> list[Key]:
    """Chunks that a load from one length to another reads, were nothing of them on the GPU."""
    found = []
    for group, size in enumerate(config.chunk_tokens):
        wanted, window = keys[group][local // size : -(-end // size)], config.load_window(group, end)
        found += wanted if window is None else wanted[-window:]
    return found


class _Search:
    """One lookup. `later` says that a chunk of the length found so far is being written, `settled` which draft's groups
    have already given up their last chunk."""

    def __init__(
        self, config: OffloadConfig, look: Look, keys: Sequence[Sequence[Key]], local: int, limited: bool
    ) -> None:
        self._config, self._look, self._keys, self._local, self._limited = config, look, keys, local, limited
        self._settled: set[int] = set()

    def length(self, most: int) -> int | None:
        """Tokens beyond the local hit, `most` at most in all."""
        groups, hit, later = self._config.lookup_order, 0, False
        while groups:
            again: tuple[int, ...] = ()
            windows = False
            for group in groups:
                most, waits = self._group(group, most)
                later |= waits
                if most - self._local < self._config.chunk_tokens[group]:
                    return 0
                if most - self._local < hit:
                    if group not in self._config.eagle:
                        self._settled.clear()
                    if later:
                        later, again = False, self._config.lookup_order
                    elif windows and not again:
                        again = self._config.windows
                windows |= self._config.window(group) is not None
                hit = most - self._local
            groups = again
        return None if later else hit

    def _group(self, group: int, most: int) -> tuple[int, bool]:
        """Length at which one group can resume, `most` at most, 0 for none; and whether that is to be seen later."""
        size, keys = self._config.chunk_tokens[group], self._keys[group]
        most = min(most, len(keys) * size)
        if self._limited:
            most -= most % size
        if most - self._local < size:
            return 0, False
        drops = group in self._config.eagle and group not in self._settled
        asked = min(most + size, len(keys) * size) if drops else most
        start, end = self._local // size, min(-(-asked // size), len(keys))
        states = [self._look(key) for key in keys[start:end]]
        window = self._config.window(group)
        if window is None:
            count = _from_the_start(states)
        else:
            first = self._config.load_window(group, min(most, (end - drops) * size))
            assert first is not None
            count = _from_the_end(states, window + drops, first + drops)
        if not count:
            return (0, False) if count == 0 else (most, True)
        if drops:
            count -= 1
            self._settled.add(group)
        return min(most, (start + count) * size), False


def _from_the_start(states: Sequence[bool | None]) -> int | None:
    """Chunks up to the first that is absent; None if one of them is being written."""
    count = next((place for place, state in enumerate(states) if state is None), len(states))
    return None if False in states[:count] else count


def _from_the_end(states: Sequence[bool | None], window: int, first: int) -> int | None:
    """End of the last run of `window` chunks that are there, of `first` where it is the very last one.

    A run that reaches the first chunk asked for counts whatever its length. None if one of the run is being written.
    """
    run, need = 0, first
    for place in reversed(range(len(states))):
        if states[place] is None:
            run, need = 0, window
            continue
        run += 1
        if run == need:
            return None if False in states[place : place + run] else place + run
    return None if False in states[:run] else run
