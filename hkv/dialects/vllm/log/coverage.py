"""Coverage of the rules by a log, as far as its operations and the recorded answers show."""

from __future__ import annotations

from collections.abc import Iterable

from hkv.contract.log import Log
from hkv.dialects.vllm import kinds
from hkv.dialects.vllm.lifecycle import Lifecycle
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import CacheEvent, Header, Operation
from hkv.spec import KINDS, LayerSpec

RULES = {
    "hit/none": "a lookup finds nothing",
    "hit/full": "a full-attention or MLA group contributes blocks to a hit",
    "hit/sliding-window-run": "a run of blocks as long as the window is found, nothing needed before it",
    "hit/sliding-window-prefix": "a run anchored at the first block is a hit though shorter than the window",
    "hit/chunk": "earlier chunks count as hit without being looked up",
    "hit/mamba": "a recurrent state is found",
    "hit/inside-block": "a hit ends inside a block",
    "hit/unequal-blocks": "groups with different block sizes agree on a hit",
    "hit/shared-prefix": "the search for the hit came to more, which a later group shortened",
    "hit/eagle": "a hit under the EAGLE drop rule",
    "hit/lookahead-hash": "a hit on hashes that look ahead",
    "hit/context-parallel": "a hit on blocks split over ranks",
    "hit/extra-keys": "a hit of a request with extra keys",
    "hit/after-preemption": "a request that ran before hits again",
    "hit/drops-nothing-left": "a lookup under the EAGLE drop rule finds nothing, though a group alone finds a prefix",
    "lookup/after-reset": "a prompt is looked up again that requests had before the cache was reset",
    "admit/gate": "a request is admitted through the full-sequence gate",
    "admit/copy": "a request is admitted whose hit ends inside a block of attention, which is to be copied",
    "admit/edge": "a request is admitted that was refused when one block more was set aside",
    "refuse/gate": "a waiting request is refused with the full-sequence gate on",
    "refuse/need": "a request is refused by what its next tokens need",
    "refuse/running": "a running request is refused",
    "refuse/reserved": "a request is refused while blocks are reserved for others",
    "refuse/watermark": "a waiting request is refused under a watermark",
    "refuse/copy": "a request is refused whose hit ends inside a block of attention, which is to be copied",
    "allocate/in-flight": "tokens in flight hold blocks that could be retired",
    "allocate/look-ahead": "slots are kept for tokens to come",
    "allocate/drafts": "unverified draft tokens get slots",
    "allocate/drafts-rejected": "some of them are rejected",
    "allocate/external": "external tokens are admitted",
    "allocate/external-two-phase": "external tokens follow a local hit: hits are touched first",
    "allocate/delayed": "registration waits until external tokens have arrived",
    "allocate/length-limit": "max_model_len cuts the slots",
    "allocate/pinned-boundary": "a shared-prefix boundary is set",
    "allocate/opaque": "a request owns an opaque region",
    "allocate/encoder": "a request gets blocks for an encoder's output",
    "copy/hit": "a hit inside a block is copied before it is written",
    "copy/owner": "the owner of a registered tail goes on writing, its entry moves to a copy",
    "mamba/draft-states": "scratch states of drafts are taken",
    "mamba/checkpoint": "a state inside a prefill chunk is kept",
    "retire/sliding-window": "blocks before the window are given back",
    "retire/chunk": "blocks before the chunk are given back",
    "retire/mamba": "earlier states are given back",
    "register/full": "filled blocks are registered",
    "register/skipped": "a span is registered without all of its blocks",
    "register/nothing": "a span is looked at and nothing of it is registered",
    "register/partial": "an entry inside a block is registered",
    "register/duplicate": "two blocks hold the same key",
    "register/commit": "tokens are registered after they were computed",
    "evict/reuse": "a cached block is handed out and loses its keys",
    "evict/named": "named blocks lose their keys",
    "reset/done": "the prefix cache is reset",
    "reset/refused": "a reset is refused while blocks are in use",
    "request/preempted": "a request is preempted and comes back",
    "request/dropped": "a waiting request is forgotten",
    "retention/last-only": "only the last replay boundary is retained",
    "retention/interval": "boundaries at an interval are retained",
    "caching/off": "nothing is looked up or registered",
}
"""Every rule the table knows, with what it means that a log exercised it."""


def exercised(log: Log) -> dict[str, int]:
    """Number of times that each rule of `RULES` was exercised; rules that were not are absent."""
    observer = CoverageObserver(log.header)
    for operation in log.operations:
        observer.see(operation)
    return {rule: count for rule in RULES if (count := observer.counts.get(rule, 0))}


class CoverageObserver:
    """Follows a log and counts what exercises a rule: `counts`, number of times so far, by rule."""

    def __init__(self, header: Header) -> None:
        self.counts: dict[str, int] = {}
        self._header = header
        config = to_config(header)
        self._specs, self._sizes = config.topology.specs, config.block_sizes
        self._lifecycle = Lifecycle(header)
        self._extra: set[str] = set()
        self._targets: set[int] = set()
        self._copied: set[str] = set()
        self._refused: tuple[str, int] | None = None
        self._starts: dict[str, tuple[int, ...]] = {}
        self._asked: set[tuple[int, ...]] = set()
        self._forgotten: set[tuple[int, ...]] = set()
        self._named = False
        self._note("caching/off", not header.caching)
        self._note("retention/last-only", header.retention_interval == 0)
        self._note("retention/interval", bool(header.retention_interval))

    def see(self, operation: Operation) -> frozenset[str]:
        """Takes note of an operation with its answer; the rules that it exercised."""
        before_it = dict(self.counts)
        self._see(operation)
        return frozenset(rule for rule, count in self.counts.items() if count != before_it.get(rule, 0))

    def _see(self, operation: Operation) -> None:
        states = self._lifecycle.requests
        before = states.get(getattr(operation, "id", ""))
        running = before is not None and before.running
        match operation:
            case oplog.RequestOp(id=id, tokens=tokens, extra=extra):
                self._starts[id] = tuple(tokens[: self._header.hash_block_size])
                if extra is not None:
                    self._extra.add(id)
            case oplog.LookupOp(want=hit) if hit is not None:
                self._lookup(operation.id, hit)
            case oplog.AllocateOp(want=answer) if answer is not None and before is not None:
                self._allocation(operation, running, before.computed, before.tokens)
            case oplog.AdvanceOp(tokens=tokens) if before is not None:
                self._note("allocate/drafts-rejected", before.computed + tokens < before.granted > before.tokens)
            case oplog.CommitOp():
                self._note("register/commit", self._header.caching)
            case oplog.DropOp():
                self._note("request/dropped")
            case oplog.EvictOp():
                self._named = True
            case oplog.CopiesOp(want=pairs):
                for _, target in pairs or ():
                    self._note("copy/hit" if target in self._targets else "copy/owner")
                self._targets.clear()
            case oplog.ResetOp(want=answer) if answer is not None:
                self._note("reset/done" if answer.ok else "reset/refused")
                self._forgotten |= self._asked if answer.ok else set()
            case oplog.EventsOp(want=events):
                self._events(events or [])
            case oplog.StateOp(want=state) if state is not None:
                self._state(state)
            case _:
                pass
        self._lifecycle.follow(operation)
        self._lifecycle.answered(operation, getattr(operation, "want", None))

    def _note(self, rule: str, happened: bool = True) -> None:
        if happened:
            self.counts[rule] = self.counts.get(rule, 0) + 1

    def _lookup(self, id: str, found: oplog.Hit) -> None:
        header, hit = self._header, found.hit
        self._note("request/preempted", self._lifecycle.requests[id].returned)
        self._note("hit/none", header.caching and hit == 0)
        self._note("hit/shared-prefix", found.shared_prefix > 0)
        self._note("hit/drops-nothing-left", header.eagle and not hit and found.shared_prefix > 0)
        self._note("lookup/after-reset", self._starts.get(id) in self._forgotten)
        self._asked.add(self._starts.get(id, ()))
        inside = any(spec.reads_all and hit % self._sizes[group] for group, spec in enumerate(self._specs))
        (self._copied.add if inside else self._copied.discard)(id)
        if not hit:
            return
        sizes = [self._sizes[group] for group, blocks in enumerate(found.blocks) if blocks]
        self._note("hit/inside-block", any(hit % size for size in sizes))
        self._note("hit/unequal-blocks", len(set(sizes)) > 1)
        self._note("hit/eagle", header.eagle)
        self._note("hit/lookahead-hash", header.hash_lookahead > 0)
        self._note("hit/context-parallel", header.context_parallel > 1)
        self._note("hit/extra-keys", id in self._extra)
        self._note("hit/after-preemption", self._lifecycle.requests[id].returned)
        for spec, blocks in zip(self._specs, found.blocks, strict=True):
            rule = _hit_rule(spec, bool(blocks) and blocks[0] == 0)
            self._note(rule, bool(rule) and bool(blocks))

    def _allocation(self, operation: oplog.AllocateOp, running: bool, computed: int, tokens: int) -> None:
        self._note("allocate/in-flight", operation.in_flight > 0)
        refused, self._refused = self._refused, None
        granted = None if operation.want is None else operation.want.blocks
        if granted is None:
            self._refused = operation.id, operation.reserved
            self._note("refuse/running", running)
            self._note("refuse/gate", operation.must_fit)
            self._note("refuse/need", not operation.must_fit)
            self._note("refuse/reserved", operation.reserved > 0)
            self._note("refuse/copy", operation.hit > 0 and operation.id in self._copied)
            self._note("refuse/watermark", self._header.watermark > 0 and not running)
        elif not running:
            self._note("admit/edge", refused == (operation.id, operation.reserved + 1))
            self._note("admit/copy", operation.hit > 0 and operation.id in self._copied)
        self._note("allocate/pinned-boundary", bool(operation.shared_prefix))
        if granted is None:
            return
        end = computed + operation.hit + operation.external + operation.new
        self._note("admit/gate", operation.must_fit)
        self._note("allocate/look-ahead", operation.lookahead > 0)
        self._note("allocate/drafts", end > tokens)
        self._note("allocate/external", operation.external > 0)
        self._note("allocate/external-two-phase", operation.external > 0 and operation.hit > 0)
        self._note("allocate/delayed", operation.delay)
        self._note("allocate/length-limit", end + operation.lookahead > self._header.max_model_len)
        for group, blocks in zip(self._header.groups, granted, strict=True):
            new = [block for block in blocks if block]
            self._note("allocate/opaque", KINDS[group["kind"]].one_block and bool(new))
            self._note("allocate/encoder", "encoder_len" in group and bool(new))
            self._note("mamba/draft-states", bool(group.get("num_speculative_blocks")) and len(new) > 1)
            kept = len(blocks) > 1 and blocks[-2] != 0
            self._note("mamba/checkpoint", bool(group.get("num_prefill_checkpoint_blocks")) and kept)
            if not running and operation.hit:
                self._targets.update(blocks[:1])

    def _events(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            if event.type == "stored":
                spanned = len(event.tokens or ()) // max(1, event.block_size)
                partial = event.block_size < self._sizes[event.group]
                self._note("register/partial", partial)
                self._note("register/full", event.num_blocks > 0 and not partial)
                self._note("register/skipped", 0 < event.num_blocks < spanned)
                self._note("register/nothing", event.num_blocks == 0)
            elif event.type == "removed":
                self._note("evict/named" if self._named else "evict/reuse")
        self._named = False

    def _state(self, state: oplog.CacheState) -> None:
        keys = [(group, key) for group, _, key in state.cached.values()]
        self._note("register/duplicate", len(set(keys)) < len(keys))
        for row in state.rows.values():
            for spec, blocks in zip(self._specs, row, strict=True):
                rule = _retire_rule(spec)
                self._note(rule, bool(rule) and bool(blocks) and blocks[0] == 0)


def _hit_rule(spec: LayerSpec, skips: bool) -> str:
    """The rule of a hit in a group; `skips`: its first block is null. Empty for none."""
    if spec.snapshot:
        return "hit/mamba"
    if kinds.layer(spec).seeks_run:
        return "hit/sliding-window-run" if skips else "hit/sliding-window-prefix"
    return ("hit/chunk" if skips else "") if not spec.reads_all else "" if skips else "hit/full"


def _retire_rule(spec: LayerSpec) -> str:
    """The rule by which a group's first blocks are given back; empty for none."""
    if spec.reads_all or spec.one_block or spec.encoder_tokens:
        return ""
    return (
        "retire/mamba" if spec.snapshot else "retire/sliding-window" if kinds.layer(spec).seeks_run else "retire/chunk"
    )
