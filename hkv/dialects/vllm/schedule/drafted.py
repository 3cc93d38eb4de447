"""Drafts in a replay with a second tier: tokens that a draft proposes each step, and those of them that are accepted.

A step that samples checks the tokens proposed before it, and computes those in vain that are rejected. How many are
accepted is the replay's own number, for no model runs: all but one of the tokens that a step is to generate
(`Schedule.decode_tokens`), as far as they were proposed. vLLM 0.33 `Scheduler.schedule`, `update_from_output`.
"""

from __future__ import annotations

from typing import Any

from hkv.dialects.vllm.schedule.tiered_replay import TieredReplay
from hkv.replay.schedule import FINISHED, LiveRequest
from reference.dialects.vllm import live as operations


class DraftedReplay(TieredReplay):
    """Drives the reference as vLLM 0.33's scheduler would, `OffloadConfig.drafts` tokens being proposed each step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._drafts = self._tier.config.drafts
        self._ahead = 1 + 2 * self._drafts
        self._proposed: set[str] = set()
        self._checked: dict[str, int] = {}
        self._padded: set[str] = set()
        self._prefills = self._decodes = False

    def _step(self, step: int) -> None:
        self._prefills = self._decodes = False
        super()._step(step)

    # Tokens of running requests.

    def _tokens(self, live: LiveRequest, budget: int) -> int:
        if live.id not in self._proposed:
            return super()._tokens(live, budget)
        room = self._schedule.max_model_len - live.computed - 1
        return min(live.tokens + self._drafts - live.computed, budget, room)

    def _grow(self, live: LiveRequest, new: int) -> bool:
        if not super()._grow(live, new):
            return False
        self._checked[live.id] = max(0, live.computed + new - live.tokens)
        self._proposed.discard(live.id)
        self._prefills |= live.id in self._prefilling
        self._decodes = True
        return True

    def _free(self, live: LiveRequest, *, finished: bool) -> None:
        self._proposed.discard(live.id)
        super()._free(live, finished=finished)

    # Tokens of those that are admitted.

    def _opening(self, live: LiveRequest, start: int, budget: int) -> int:
        """As of any replay, but that a request with one token left takes room for drafts that there are not, so that
        all requests of a step are alike."""
        shape = 1 + self._drafts
        self._padded.discard(live.id)
        fits = start + 1 + shape <= self._schedule.max_model_len
        if live.tokens - start != 1 or self._prefills or not (self._decodes or start) or not fits:
            return super()._opening(live, start, budget)
        if shape > budget:
            return 0
        new = self._chunking.cut(live.arrival.prompt, live.tokens, live.shared_boundary, start, start + shape)
        if new < shape:
            return min(new, 1)
        self._padded.add(live.id)
        return new

    def _runs(self, live: LiveRequest, new: int) -> None:
        super()._runs(live, new)
        self._checked[live.id] = self._drafts if live.id in self._padded else 0

    # Output.

    def _compute(self, step: int, live: LiveRequest, tokens: int) -> None:
        live.computed += tokens
        if live.computed < live.tokens:
            return
        checked = self._checked.pop(live.id)
        right = 0 if live.id in self._padded else min(self._schedule.decode_tokens - 1, checked)
        left = live.arrival.prompt + live.arrival.output - live.tokens
        told = min(1 + right, left)
        live.computed += told - 1 - checked
        operations.computed(self._manager, live.id, live.computed)
        self._extend(live, told)
        live.tokens += told
        self._manager.commit(live.id, live.computed, checked=False)
        self._padded.discard(live.id)
        self._proposed.add(live.id)
        if told == left:
            self._running.remove(live)
            self._free(live, finished=True)
            self._drop(live)
            self._observer.ended(step, live.arrival, FINISHED)
