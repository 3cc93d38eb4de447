"""Random lock-step traffic: what a scheduler would ask of a hybrid cache, and what it had better not be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hkv.contract.traffic import Choices, RandomChoices
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.configuration import to_config
from hkv.dialects.vllm.log.structs import Allocation, Answer, Header, Hit, Operation
from hkv.dialects.vllm.traffic.headers import (
    BEGUN_KEY,
    FEATURES,
    LATER_KEY,
    LONG_ROWS,
    REACHING,
    SHARING,
    begins_inside,
    copies_states,
    draw_header,
    loads,
    looks_again,
)
from hkv.dialects.vllm.traffic.prompts import DrawnRequest, Prompts, Text
from hkv.spec import KINDS

__all__ = ["FEATURES", "Choices", "RandomChoices", "Traffic", "draw_header"]

Perform = Callable[[Operation], Answer]


class Traffic:
    """A scheduler of no judgement, one step at a time, or one move at a time (`hkv.contract.traffic.Moves`).

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
      careful: leave out what vLLM 0.33 itself fails at.
    """

    def __init__(self, header: Header, choices: Choices, perform: Perform, careful: bool = True) -> None:
        self._careful = careful
        self._left: list[str] = []
        self._header = header
        self._choices = choices
        self._perform = perform
        self._prompts = Prompts(header, choices)
        self._running: list[DrawnRequest] = []
        self._writing: list[tuple[DrawnRequest, int]] = []  # in this step, and from which token on
        self._waiting: list[DrawnRequest] = []
        self._arrived = 0
        self._sharing, self._long = header.feature == SHARING, header.feature == LONG_ROWS
        self._lookahead = choices.pick((0, 0, 2, 3)) if header.feature in _DRAFTING else 0
        self._drafts = choices.pick((0, 1, 2, 3))
        self._recurrent = [group for group in header.groups if KINDS[group["kind"]].snapshot]
        self._load = choices.integer(20, 80) if not self._sharing else choices.integer(60, 90)
        self._loads = loads(header)
        self._found: list[int] = []
        self._filled: list[int] = []
        self._config = to_config(header)
        self._sparse = [not spec.reads_all for spec in self._config.topology.specs]
        self._crowds = self._loads and not self._recurrent and not all(self._sparse[1:])
        self._copying = copies_states(self._config)
        self._follows = self._sharing and self._copying and bool(self._recurrent)
        exports = any(group.get("num_prefill_checkpoint_blocks") for group in self._recurrent)
        self._exports_last = exports and header.retention_interval == 0
        self._looks_again = careful and looks_again(header) and LATER_KEY not in header.bugs
        self._begins_inside = careful and begins_inside(header) and BEGUN_KEY not in header.bugs

    def step(self) -> None:
        """One scheduling step."""
        choices = self._choices
        self._perform(oplog.StepOp())
        self._writing.clear()
        for request in list(self._running):
            if request in self._running:
                self._continue(request)
        if self._follows:
            self._follow()
        while choices.chance(self._load) and len(self._waiting) < 6:
            self._arrive()
        for request in list(self._waiting)[:4]:
            if not self._admit(request) and choices.chance(60):
                break
        if self._sharing:
            self._take_out()
            if self._crowds and choices.chance(30):
                self._crowd()
            if self._follows and choices.chance(40):
                self._lead()
        if choices.chance(6):
            self._evict()
        if self._copying:
            self._copy()
        if choices.chance(4):
            self._perform(oplog.ResetOp())
        self._perform(oplog.EventsOp())
        self._perform(self._observe())

    def possible(self, move: str) -> bool:
        """True if there is a request that the move can be about."""
        return bool(self._waiting) if move == "admit" else bool(self._running) or move not in ABOUT_RUNNING

    def make(self, move: str) -> None:
        """Makes a move."""
        choices = self._choices
        match move:
            case "arrive" | "evict":
                getattr(self, f"_{move}")()
            case "admit":
                self._admit(choices.pick(self._waiting))
            case "go_on":
                self._continue(choices.pick(self._running))
            case "finish" | "preempt":
                getattr(self, f"_{move}")(choices.pick(self._running))
            case "next_step":
                copies = [oplog.CopiesOp()] if self._copying else []
                for operation in (*copies, oplog.EventsOp(), oplog.StateOp(), oplog.StepOp()):
                    self._perform(operation)
            case _:
                self._perform(oplog.ResetOp())

    def _take_out(self) -> None:
        """Some blocks of a hit, or of a group that can do without, lose their keys, so that what is cached has holes;
        then waiting requests look again."""
        found = self._found if self._choices.chance(30) else self._filled
        if found and self._choices.chance(75):
            blocks = {self._choices.pick(found) for _ in range(self._choices.integer(1, 3))}
            self._perform(oplog.EvictOp(blocks=sorted(blocks)))
        for request in self._waiting[:2]:
            self._look_up(request)

    def _crowd(self) -> None:
        """A load after a hit whose blocks are among the next to be handed out: they were given back before
        others, and what comes before both in the queue is used up."""
        for other in list(self._running):
            self._finish(other)
        unit, tokens = self._header.scheduler_block_size, self._prompts.tokens
        length = self._longest((self._header.num_blocks - 1) // 2)
        if length <= 2 * unit:
            return
        kept, other = (self._arrive(Text(tuple(tokens(count)), None)) for count in (2 * unit + 1, length))
        if not all(self._take(request, len(request.tokens)) for request in (kept, other)):
            return
        self._finish(kept)
        self._finish(other)
        known = kept.tokens[: 2 * unit]
        hit = self._look_up(self._arrive(Text((*known, *tokens(1)), None))).blocks
        ahead = next((place for place, block in enumerate(self._free()) if any(block in row for row in hit)), 0)
        if full := self._longest(ahead):
            self._take(self._arrive(Text(tuple(tokens(full)), None)), full)
        end = self._longest(len(self._free())) // unit * unit
        if end <= 2 * unit:
            return
        loader = self._arrive(Text((*known, *tokens(end + 1 - 2 * unit)), None))
        found = self._look_up(loader)
        fields = {"hit": found.hit, "external": end - found.hit, "delay": True}
        loader.loading = self._take(loader, 0, shared_prefix=found.shared_prefix, **fields)

    def _lead(self) -> None:
        """Computes a prompt that nobody had up to where it resumes, for `_follow`."""
        unit = self._header.hash_block_size
        most = min(self._header.max_model_len // 2, 4 * self._header.scheduler_block_size)
        if most > unit:
            length = self._choices.integer(unit + 1, most)
            request = self._arrive(Text(tuple(self._prompts.tokens(length)), None))
            self._take(request, (length - 1) // unit * unit)

    def _follow(self) -> None:
        """Asks for a prompt anew as its request has just gone on from the state at its end: a copy of that is still to
        be made, and what it is to hold cannot be read before the next step."""
        unit = self._header.hash_block_size
        for other, start in self._writing:
            if other in self._running and start == (other.prompt - 1) // unit * unit > 0:
                self._admit(self._arrive(other.text()))
                return

    def _take(self, request: DrawnRequest, new: int, **fields: Any) -> bool:
        """Admits a waiting request; whether there was room."""
        if self._allocate(request, new, **fields).blocks is None:
            return False
        self._waiting.remove(request)
        self._running.append(request)
        self._advance(request, fields.get("hit", 0) + fields.get("external", 0) + new)
        return True

    def _take_at_edge(self, request: DrawnRequest, new: int, fields: dict[str, Any]) -> bool:
        """Admits the request that was just looked up as soon as so few blocks are set aside that there is room, so that
        a block counted too many or too few shows."""
        free = len(self._free())
        for reserved in (*range(free, max(0, free - EDGE), -1), 0):
            self._look_up(request, again=True)
            if self._take(request, new, reserved=reserved, **fields):
                return True
        return False

    def _free(self) -> list[int]:
        state = self._perform(oplog.StateOp())
        assert isinstance(state, oplog.CacheState)
        return state.free

    def _longest(self, blocks: int) -> int:
        """The most tokens, of those that a request may have, that fit into so many blocks; else 0."""
        sizes = [self._config.block_size(group) for group in range(len(self._header.groups))]
        lengths = range(self._header.max_model_len - 3, 0, -1)
        return next((length for length in lengths if sum(-(-length // size) for size in sizes) <= blocks), 0)

    def _copy(self) -> None:
        self._perform(oplog.CopiesOp())

    def _observe(self) -> Operation:
        return oplog.StateOp()

    def drain(self) -> None:
        """Ends all requests, so that the cache can be reset."""
        for request in list(self._running):
            self._finish(request)
        self._perform(oplog.StateOp())
        self._perform(oplog.ResetOp())
        self._perform(oplog.EventsOp())
        self._perform(oplog.StateOp())

    def _arrive(self, text: Text | None = None) -> DrawnRequest:
        text = self._prompts.draw() if text is None else text
        request = DrawnRequest(self._name(), list(text.tokens), text.extra, len(text.tokens))
        self._waiting.append(request)
        self._perform_arrival(oplog.RequestOp(id=request.id, tokens=list(request.tokens), extra=request.extra))
        return request

    def _perform_arrival(self, operation: oplog.RequestOp) -> None:
        self._perform(operation)

    def _name(self) -> str:
        """A new name, or that of a request that was dropped."""
        if self._left and self._choices.chance(50):
            return self._left.pop()
        self._arrived += 1
        return f"r{self._arrived}"

    def _continue(self, request: DrawnRequest) -> None:
        choices = self._choices
        full = len(request.tokens) >= self._header.max_model_len - 1
        if full or (len(request.tokens) > request.prompt and choices.chance(12)):
            self._finish(request)
            return
        if choices.chance(5):
            self._preempt(request)
            return
        if request.loading:
            if choices.chance(60):
                request.loading = False
                self._loaded(request)
            return
        if request.computed == len(request.tokens):
            self._append(request, 1)
        new = self._next_tokens(request, request.computed)
        drafts = max(0, request.computed + new - len(request.tokens))
        if self._allocate_running(request, new):
            self._compute(request, new, drafts)

    def _loaded(self, request: DrawnRequest) -> None:
        self._commit(request)

    def _compute(self, request: DrawnRequest, new: int, drafts: int) -> None:
        choices = self._choices
        accepted = choices.integer(0, drafts)
        self._advance(request, new - drafts + accepted)
        if drafts:
            self._append(request, accepted + (0 if choices.chance(15) else 1))
        if (drafts or choices.chance(12)) and choices.chance(75):
            self._commit(request)

    def _allocate_running(self, request: DrawnRequest, new: int) -> bool:
        if self._allocate(request, new).blocks is not None:
            return True
        if self._choices.chance(25):
            return False
        victim = self._running[-1]
        self._preempt(victim)
        if victim is request or self._choices.chance(30):
            return False
        return self._allocate(request, new).blocks is not None

    def _admit(self, request: DrawnRequest) -> bool:
        choices = self._choices
        found = self._look_up(request)
        if self._careful and self._is_copied_unwritten(request, found.hit):
            return False
        hit, external, rows = self._adopted(found, self._draw_external(request, found.hit))
        delay = external > 0 and choices.chance(50)
        new = 0 if delay and choices.chance(50) else self._next_tokens(request, hit + external, drafts=False)
        reserved = choices.pick((1, 3, 5, 10, 20)) if choices.chance(30) else 0
        uncounted = external and self._recurrent and self._careful
        if uncounted:
            # vLLM counts one state too few a group and fails where that one is not there: leave room, or take nothing.
            if "external-state-not-counted" in self._header.bugs:
                reserved = max(reserved, len(self._recurrent))
            else:
                delay, new = True, 0
        if not hit + external + new:
            return False
        fields: dict[str, Any] = {
            "hit": hit,
            "external": external,
            "delay": delay,
            "must_fit": choices.chance(65),
            "shared_prefix": self._draw_boundary(request, found.shared_prefix),
            **({} if rows is None else {"rows": rows}),
        }
        if self._sharing and not uncounted and choices.chance(70 if self._ends_inside(hit) else 20):
            admitted = self._take_at_edge(request, new, fields)
        else:
            admitted = self._take(request, new, reserved=reserved, **fields)
        if not admitted:
            if choices.chance(25):
                self._waiting.remove(request)
                self._perform(oplog.DropOp(id=request.id))
                self._left.append(request.id)
            return False
        request.loading = delay
        return True

    def _is_copied_unwritten(self, request: DrawnRequest, hit: int) -> bool:
        """True if the hit may end inside a block that this step writes, which vLLM copies at once
        (`copied-before-written`)."""
        if not self._ends_inside(hit) or "copied-before-written" in self._config.bugs:
            return False
        return any(start <= hit and other.tokens[:hit] == request.tokens[:hit] for other, start in self._writing)

    def _ends_inside(self, hit: int) -> bool:
        """True if a hit ends inside a block of full attention, of which the request then needs a copy."""
        sizes = (
            self._config.block_size(group) for group, spec in enumerate(self._config.topology.specs) if spec.reads_all
        )
        return self._config.partial_hits and any(hit % size for size in sizes)

    def _look_up(self, request: DrawnRequest, again: bool = False) -> Hit:
        """The hit of a request; `again`: as it was asked for last, for an allocation owes the lookup before it."""
        return self._keep_found(self._perform(oplog.LookupOp(id=request.id)))

    def _keep_found(self, found: Answer) -> Hit:
        assert isinstance(found, Hit)
        self._found = [block for row in found.blocks for block in row if block] or self._found
        return found

    def _adopted(self, found: Hit, external: int) -> tuple[int, int, list[list[int]] | None]:
        """The hit that is adopted, the tokens that are loaded after it, and the hit's rows if they are not its own."""
        return found.hit, external, None

    def _draw_external(self, request: DrawnRequest, hit: int) -> int:
        if not self._loads or not self._choices.chance(70 if self._sharing else 45):
            return 0
        return self._whole_units(request, hit)

    def _whole_units(self, request: DrawnRequest, hit: int) -> int:
        """Tokens of a load that ends where a hit may, before the request's last token; 0 if there is no such end."""
        unit = self._header.scheduler_block_size
        most = (len(request.tokens) - 1) // unit
        least = hit // unit + 1
        return unit * self._choices.integer(least, most) - hit if least <= most else 0

    def _draw_boundary(self, request: DrawnRequest, found: int) -> int:
        if self._choices.chance(85):
            return found
        return self._choices.pick((0, self._choices.integer(0, len(request.tokens))))

    def _next_tokens(self, request: DrawnRequest, start: int, drafts: bool = True) -> int:
        new = self._drawn_tokens(request, start, drafts)
        for group in self._recurrent if self._begins_inside and start % self._header.hash_block_size == 0 else ():
            # A state inside the chunk would stand two columns behind that of its start (`begun-state-under-later-key`).
            size = group["block_size"]
            leaves = group["num_prefill_checkpoint_blocks"] and -(-(start + new) // size) - 2 > start // size
            new = size - start % size if leaves and start % size else new
        return new

    def _drawn_tokens(self, request: DrawnRequest, start: int, drafts: bool) -> int:
        choices = self._choices
        left = len(request.tokens) - start
        least = max(request.prompt, start + 1)
        if self._exports_last and least < len(request.tokens) - 1 and choices.chance(60):
            # A chunk that ends in the output of a request that comes back: its last one alone exports a state.
            return choices.integer(least, len(request.tokens) - 2) - start
        boundary = (request.prompt - 1) // self._header.hash_block_size * self._header.hash_block_size
        if self._sharing and start < boundary and choices.chance(35):
            return boundary - start  # where the same prompt resumes
        if left > 1 and choices.chance(15 if self._long else 45):
            unit = self._header.scheduler_block_size if choices.chance(50) else self._header.hash_block_size
            most = 3 if not self._long else max(3, left // unit)
            end = (start // unit + choices.integer(1, most)) * unit + (
                choices.integer(-1, 1) if choices.chance(35) else 0
            )
            if 0 < end - start < left:
                return end - start
        room = self._header.max_model_len - 1 - len(request.tokens)
        extra = min(self._drafts, room) if drafts and self._drafts and choices.chance(40) else 0
        return left + (extra if self._may_draft(start, len(request.tokens) + extra) else 0)

    def _may_draft(self, start: int, end: int) -> bool:
        # A prefill checkpoint would lie among unverified drafts, beyond the keys (`checkpoint-beyond-keys`).
        for group in self._recurrent:
            last = -(-end // group["block_size"]) - 2
            if group["num_prefill_checkpoint_blocks"] and last > (start - 1) // group["block_size"]:
                return False
        return True

    def _allocate(self, request: DrawnRequest, new: int, **fields: Any) -> Allocation:
        in_flight = self._in_flight(request)
        operation: dict[str, Any] = {
            "hit": 0,
            "external": 0,
            "delay": False,
            "must_fit": False,
            "reserved": 0,
            "lookahead": self._lookahead,
            "in_flight": in_flight,
            **fields,
        }
        answer = self._perform(oplog.AllocateOp(id=request.id, new=new, **operation))
        assert isinstance(answer, Allocation)
        request.retires = self._looks_again and answer.blocks is not None
        if answer.blocks is not None:
            self._writing.append((request, request.computed + operation["hit"] + operation["external"]))
        rows = zip(self._sparse, answer.blocks or (), strict=False)
        self._filled = [*self._filled, *(block for sparse, row in rows if sparse for block in row if block)][-KNOWN:]
        return answer

    def _in_flight(self, request: DrawnRequest) -> int:
        if request.computed and self._choices.chance(25):
            found = self._choices.integer(1, min(request.computed, self._choices.pick((1, 1, 4, 16))))
            return 0 if request.retires else found
        return 0

    def _advance(self, request: DrawnRequest, tokens: int) -> None:
        request.computed += tokens
        self._perform(oplog.AdvanceOp(id=request.id, tokens=tokens))

    def _append(self, request: DrawnRequest, count: int) -> None:
        if not count:
            return
        tokens = self._prompts.tokens(count)
        request.tokens += tokens
        self._perform(oplog.AppendOp(id=request.id, tokens=tokens))

    def _commit(self, request: DrawnRequest) -> None:
        tokens = min(request.computed, len(request.tokens))
        self._perform(oplog.CommitOp(id=request.id, tokens=tokens))

    def _preempt(self, request: DrawnRequest) -> None:
        self._release(request)
        if self._choices.chance(85):
            self._waiting.insert(0, request)

    def _finish(self, request: DrawnRequest) -> None:
        self._release(request)
        self._prompts.remember(Text(tuple(request.tokens), None))

    def _release(self, request: DrawnRequest) -> None:
        self._running.remove(request)
        request.computed, request.loading = 0, False
        self._perform(oplog.FreeOp(id=request.id))

    def _evict(self) -> None:
        count = self._choices.integer(1, 4)
        blocks = {self._choices.integer(1, self._header.num_blocks - 1) for _ in range(count)}
        self._perform(oplog.EvictOp(blocks=sorted(blocks)))


ABOUT_RUNNING = ("go_on", "finish", "preempt")
"""Moves that want a request which runs."""

KNOWN = 30
"""Blocks handed out last, of groups that can do without some, that may be taken out of what is cached."""

EDGE = 10
"""Blocks that a request may need at most, to be admitted where there is just room for it."""

_DRAFTING = ("core", "eagle", "lookahead_hash", "speculative_state", *REACHING)
"""Features whose traffic may reserve look-ahead slots."""
