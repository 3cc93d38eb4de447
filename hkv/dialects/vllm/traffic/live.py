"""Random traffic of a live scheduler: what version 3 of the log adds to `hkv.dialects.vllm.traffic.traffic`.

Steps that have not come back, with drafts among them, so that more tokens are computed than there are, and fewer once
drafts are rejected; loads that fail, or bring the whole prompt; blocks that outlive their requests; hits that were cut;
requests that wait while they hold blocks; keys that are given.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hkv.contract.traffic import Choices
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.config import EARLIER
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import (
    CacheState,
    ConnectorHit,
    Header,
    Hit,
    Operation,
    Truncated,
)
from hkv.dialects.vllm.traffic.connector import Connector
from hkv.dialects.vllm.traffic.headers import (
    later_choices,
)
from hkv.dialects.vllm.traffic.prompts import VOCABULARY, DrawnRequest
from hkv.dialects.vllm.traffic.traffic import Perform, Traffic
from hkv.keys.chained import GIVEN, KeyChain, sha256_cbor
from hkv.spec import LayerSpec


@dataclasses.dataclass
class _Scheduled:
    """Steps of a request that have not come back: of each, its tokens and how many of them are drafts."""

    steps: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.steps)


def _bounds(spec: LayerSpec) -> bool:
    """True if a row of a hit cannot be cut longer than it is."""
    return spec.prefix_cacheable and not spec.snapshot


class LiveTraffic(Traffic):
    """Traffic of version 3; arguments as of `Traffic`."""

    def __init__(self, header: Header, choices: Choices, perform: Perform, careful: bool = True) -> None:
        self._connector = Connector(header, perform, careful)
        super().__init__(header, choices, self._connector.perform, careful)
        self._asynchronous = choices.chance(50)
        self._scheduled: dict[str, _Scheduled] = {}
        self._owed: list[list[int]] = []
        self._negative = choices.chance(15)
        self._limits = header.dialect != EARLIER  # there lookups have no limit
        self._limit: int | None = None
        self._diverged = False
        self._chains: dict[str, KeyChain] = {}
        self._encoder = self._config.encoder_tokens
        replayed = (spec for spec in self._config.topology.specs if kinds.layer(spec).replays)
        self._replayed = max((spec.most_read for spec in replayed), default=0)
        self._loads_whole = all(spec.reads_all for spec in self._config.topology.specs)
        self._sizes = [group["block_size"] for group in header.groups]
        self._later = later_choices(header)
        # Groups by themselves look for keys beyond those that there are (`finder-index-error`).
        self._connects = header.oplog > 3 and not (careful and header.hash_lookahead > 1)
        self._streams = header.hash_lookahead == 0 and self._later.chance(50)
        self._sessions = (None, "s", "t") if self._later.chance(50) else (None,)
        self._reports = self._may_report() and self._later.chance(50)

    def step(self) -> None:
        while self._owed and self._choices.chance(60):
            self._perform(oplog.ReleaseOp(blocks=self._owed.pop(0)))
        super().step()
        self._owe(self._connector.take())
        if self._header.zeroing and self._later.chance(80):
            self._perform(oplog.ZerosOp())

    def drain(self) -> None:
        for blocks in self._owed:
            self._perform(oplog.ReleaseOp(blocks=blocks))
        self._owed.clear()
        super().drain()

    # What requests are.

    def _perform_arrival(self, operation: oplog.RequestOp) -> None:
        change: dict[str, Any] = {"tokens": self._signed(operation.tokens)}
        if self._header.hash == GIVEN:
            chain = KeyChain(sha256_cbor, self._header.hash_block_size, self._header.hash_lookahead)
            self._chains[operation.id] = chain
            change["keys"] = self._grown(operation.id, change["tokens"])
        change["session"] = self._later.pick(self._sessions)
        change["report"] = oplog.FULL if self._reports and self._later.chance(50) else None
        for name, value in change.items():
            setattr(operation, name, value)
        self._perform(operation)

    def _append(self, request: DrawnRequest, count: int) -> None:
        if count:
            self._append_tokens(request, self._prompts.tokens(count))

    def _append_tokens(self, request: DrawnRequest, tokens: list[int]) -> None:
        request.tokens += tokens
        operation = oplog.AppendOp(id=request.id, tokens=self._signed(tokens))
        if request.id in self._chains:
            operation.keys = self._grown(request.id, self._signed(request.tokens))
        self._perform(operation)

    def _signed(self, tokens: list[int]) -> list[int]:
        return [-1 - token for token in tokens] if self._negative else list(tokens)

    def _grown(self, id: str, tokens: list[int]) -> list[str]:
        chain = self._chains[id]
        known = len(chain.keys)
        chain.extend(tokens)
        return [key.hex() for key in chain.keys[known:]]

    def _may_report(self) -> bool:
        """True if hits may be published: not where vLLM fails at it, or names what is not there unless it is asked to
        (`hit-reported-by-columns`)."""
        header, specs = self._header, self._config.topology.specs
        if not self._careful:
            return True
        if header.partial_hits or any(spec.block_size % header.hash_block_size for spec in specs):
            return False
        plain = all(spec.reads_all for spec in specs) and header.context_parallel == 1
        return plain or "hit-reported-by-columns" in header.bugs

    # What is asked of the cache.

    def _look_up(self, request: DrawnRequest, again: bool = False) -> Hit:
        self._diverged = False
        if not again and self._connects and self._later.chance(50):
            limit = self._later.integer(0, len(request.tokens) - 1) if self._limits and self._later.chance(15) else None
            found = self._perform(oplog.ConnectorLookupOp(id=request.id, limit=limit))
            assert isinstance(found, ConnectorHit)
            self._truncate(found)
            if self._adoptable(found):
                self._diverged = found.diverged
                return self._keep_found(found)
        if not again:
            self._limit = None
            if self._limits and self._choices.chance(15):
                self._limit = self._choices.integer(0, len(request.tokens) - 1)
        return self._keep_found(self._perform(oplog.LookupOp(id=request.id, limit=self._limit)))

    def _admit(self, request: DrawnRequest) -> bool:
        """Admits a request; what groups that replay lack of its hit is computed again.

        Not with states, which do not go back.
        """
        if not super()._admit(request):
            return False
        replays = self._replayed and not self._recurrent and request.computed and not request.loading
        if replays and self._choices.chance(80):
            self._set_computed(request, max(0, request.computed - self._replayed))
        return True

    def _allocate(self, request: DrawnRequest, new: int, **fields: Any) -> oplog.Allocation:
        if self._choices.chance(40):
            fields["waiting"] = request not in self._running or self._choices.chance(25)
            fields["scheduled"] = self._choices.chance(70)
        if self._encoder and (request not in self._running or self._choices.chance(10)):
            fields["encoder"] = self._choices.integer(0, self._encoder) or None
        if self._header.zeroing and fields.get("delay") and self._later.chance(60):
            fields["loaded"] = [group for group in range(len(self._sizes)) if self._later.chance(50)]
        return super()._allocate(request, new, **fields)

    def _in_flight(self, request: DrawnRequest) -> int:
        steps = self._scheduled.get(request.id)
        return steps.tokens if steps is not None and steps.steps else super()._in_flight(request)

    def _adopted(self, found: Hit, external: int) -> tuple[int, int, list[list[int]] | None]:
        """A hit that is cut to whole blocks where a load reaches further, or that is written out."""
        unit = self._header.scheduler_block_size
        cut = found.hit - found.hit % unit
        if isinstance(found, ConnectorHit):
            return self._completed(found, cut, external)
        if external and cut < found.hit and self._choices.chance(60):
            rows = [row[: cut // self._size(group)] for group, row in enumerate(found.blocks)]
            return cut, external + found.hit - cut, rows if cut else None
        return found.hit, external, found.blocks if found.hit and self._choices.chance(15) else None

    def _crowd(self) -> None:
        connects, self._connects = self._connects, False  # it adopts what a plain lookup found
        super()._crowd()
        self._connects = connects

    def _adoptable(self, found: ConnectorHit) -> bool:
        """True if the hit may be gone on from: at its end if no group lacks it, after a load if but states do."""
        if not found.diverged:
            return True
        lacking = [group for group, hit in enumerate(found.hits) if hit < found.hit]
        known = all(self._config.topology.specs[group].snapshot for group in lacking)
        return known and (self._loads or self._header.feature == "partial") and self._later.chance(80)

    def _truncate(self, found: Hit) -> None:
        """Asks for less of a hit, for no purpose but the answer."""
        specs = self._config.topology.specs
        rows = [row if spec.prefix_cacheable else [] for row, spec in zip(found.blocks, specs, strict=True)]
        whole = min(
            (len(row) * self._size(group) for group, row in enumerate(rows) if _bounds(specs[group])), default=0
        )
        if whole and self._later.chance(30):
            most = min(whole, found.hit) // self._header.scheduler_block_size
            tokens = self._later.integer(0, most) * self._header.scheduler_block_size
            self._perform(oplog.TruncateOp(rows=rows, tokens=tokens))

    def _completed(self, found: ConnectorHit, cut: int, external: int) -> tuple[int, int, list[list[int]] | None]:
        """A connector's hit as it is adopted: nothing of one that diverged and that no load completes; of one that a
        load goes beyond, whole blocks."""
        if not found.hit or (self._diverged and not external):
            return 0, external, None
        if not external or cut == found.hit:
            return found.hit, external, found.blocks
        left = self._perform(oplog.TruncateOp(rows=found.blocks, tokens=cut))
        assert isinstance(left, Truncated)
        return cut, external + found.hit - cut, left.blocks if cut else None

    def _next_tokens(self, request: DrawnRequest, start: int, drafts: bool = True) -> int:
        unit = self._header.hash_block_size
        left = (request.prompt - 1) // unit * unit - start
        if left > 0 and self._connector.stops():
            return left
        return super()._next_tokens(request, start, drafts)

    def _size(self, group: int) -> int:
        return self._config.block_size(group)

    def _draw_external(self, request: DrawnRequest, hit: int) -> int:
        # Of a whole prompt the last token is computed again, and a window, taken after it, lacks what that reads.
        if not (self._loads or self._header.feature == "partial"):
            return 0
        if not self._diverged and not self._choices.chance(45):
            return 0
        if self._loads_whole and self._loads and self._choices.chance(25):
            return len(request.tokens) - hit
        return self._whole_units(request, hit)

    def _advance(self, request: DrawnRequest, tokens: int) -> None:
        if self._choices.chance(50):
            super()._advance(request, tokens)
        else:
            self._set_computed(request, request.computed + tokens)

    def _set_computed(self, request: DrawnRequest, tokens: int) -> None:
        request.computed = tokens
        self._perform(oplog.ComputedOp(id=request.id, tokens=tokens))

    # How requests go on.

    def _compute(self, request: DrawnRequest, new: int, drafts: int) -> None:
        if not self._asynchronous or request.computed + new < len(request.tokens):
            super()._compute(request, new, drafts)
            return
        self._scheduled.setdefault(request.id, _Scheduled()).steps.append((new, drafts))
        self._set_computed(request, request.computed + new)

    def _continue(self, request: DrawnRequest) -> None:
        at_tail = 0 < request.computed < request.prompt and request.computed % self._header.hash_block_size == 0
        if at_tail and not request.loading and self._connector.ends():
            self._finish(request)
            return
        if self._choices.chance(8) and not request.loading:
            processed = max(0, request.computed - self._in_flight(request))
            self._perform(oplog.RetireOp(id=request.id, tokens=processed))
        steps = self._scheduled.get(request.id)
        if steps is None or not steps.steps:
            self._resume(request)
            super()._continue(request)
            return
        if len(steps.steps) < 2 and self._choices.chance(50) and self._schedule_another(request, steps):
            return
        self._come_back(request, steps)

    def _resume(self, request: DrawnRequest) -> None:
        """A streaming session goes on, all of it computed but the last token sampled, which is taken away."""
        later, keep = self._later, request.computed
        room = self._header.max_model_len - 2 - keep
        at_rest = keep >= request.prompt and len(request.tokens) - keep in (0, 1) and not request.loading
        if not (self._streams and at_rest and room > 0 and later.chance(40)):
            return
        if keep == len(request.tokens):
            self._append_tokens(request, [later.integer(0, VOCABULARY - 1)])
        tokens = [later.integer(0, VOCABULARY - 1) for _ in range(later.integer(1, min(room, 20)))]
        request.tokens[keep:] = tokens
        request.prompt = len(request.tokens)
        operation = oplog.ResumeOp(id=request.id, keep=keep, tokens=self._signed(tokens), prompt=request.prompt)
        if request.id in self._chains:
            self._chains[request.id].cut(keep, self._header.hash_block_size)
            operation.keys = self._grown(request.id, self._signed(request.tokens))
        self._perform(operation)

    def _schedule_another(self, request: DrawnRequest, steps: _Scheduled) -> bool:
        """A step after one that has not come back: its tokens do not exist yet."""
        drafts = self._drafts if self._choices.chance(50) else 0
        new = 1 + drafts
        room = self._header.max_model_len - 1 - request.computed - new
        if room < 1 or any(group["num_prefill_checkpoint_blocks"] for group in self._recurrent):
            return False
        if self._allocate_running(request, new) and request in self._running:
            steps.steps.append((new, drafts))
            self._set_computed(request, request.computed + new)
        return True

    def _come_back(self, request: DrawnRequest, steps: _Scheduled) -> None:
        _, drafts = steps.steps.pop(0)
        accepted = self._choices.integer(0, drafts)
        if drafts > accepted:
            self._set_computed(request, request.computed - (drafts - accepted))
        room = self._header.max_model_len - 1 - len(request.tokens)
        self._append(request, max(0, min(accepted + 1, room)))
        if self._choices.chance(75):
            tokens = max(0, request.computed - steps.tokens)
            self._perform(oplog.CommitOp(id=request.id, tokens=tokens))

    def _loaded(self, request: DrawnRequest) -> None:
        """A load has ended: it brought everything, or its first blocks; a whole prompt's last token is computed."""
        choices = self._choices
        if choices.chance(20):
            # Of several groups no block can be said to be missing, and what a window gave up does not come back.
            whole = len(self._sizes) > 1 or not self._config.topology.specs[0].reads_all
            arrived = choices.integer(0, 0 if whole else request.computed // self._header.scheduler_block_size)
            self._set_computed(request, arrived * self._header.scheduler_block_size)
            if not request.computed:
                self._release(request)
                self._waiting.insert(0, request)
                return
        if self._header.zeroing and self._later.chance(60):  # of a load that brought all, those behind it
            unit = self._header.scheduler_block_size
            self._perform(oplog.UnwrittenOp(id=request.id, tokens=-(-request.computed // unit) * unit))
        self._commit(request)
        if self._loads_whole and request.computed == len(request.tokens):
            self._set_computed(request, len(request.tokens) - 1)

    def _release(self, request: DrawnRequest) -> None:
        steps = self._scheduled.pop(request.id, None)
        self._owe(self._connector.finalize(request.id, 0 if steps is None else steps.tokens))
        if not self._choices.chance(25):
            super()._release(request)
            return
        state = self._perform(oplog.StateOp())
        assert isinstance(state, CacheState)
        rows = state.rows.get(request.id, [])
        self._running.remove(request)
        request.computed, request.loading = 0, False
        self._perform(oplog.PopOp(id=request.id))
        blocks = [block for row in rows for block in row if block]
        if blocks:
            self._owed.append(blocks[::-1])

    def _owe(self, blocks: list[int]) -> None:
        if blocks:
            self._owed.append(blocks)

    def _copy(self) -> None:
        hold = self._choices.chance(50)
        pairs = self._perform(oplog.CopiesOp(hold=hold))
        assert isinstance(pairs, list)
        if hold and pairs:
            self._owed.append([block for source, target in pairs for block in (source, target)])  # type: ignore[misc]

    def _observe(self) -> Operation:
        return oplog.DigestOp() if self._choices.chance(50) else oplog.StateOp()


def drive(header: Header, choices: Choices, perform: Perform, steps: int, careful: bool = True) -> None:
    """Performs random traffic: requests arrive, are admitted, refused, chunked, preempted, finished and come back.

    Every operation is legal by `docs/oplog.md`; answers decide what comes next, so two engines that agree see the same
    traffic. What vLLM 0.33 itself meets with an assertion or an exception is left out, if wanted.

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
      steps: scheduling steps; each ends with `events` and `state`.
      careful: leave out what vLLM 0.33 itself fails at.
    """
    traffic = (Traffic if header.oplog < 3 else LiveTraffic)(header, choices, perform, careful)
    for _ in range(steps):
        traffic.step()
    if choices.chance(50):
        traffic.drain()
