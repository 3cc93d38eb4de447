"""Random lock-step traffic under RTP-LLM's rules: what its engine asks of a cache, and oftener than it would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hkv.contract.traffic import Choices
from hkv.dialects.rtp_llm import log as structs
from hkv.dialects.rtp_llm.config import HYBRID_POOL, NAMES, SINGLE
from hkv.dialects.rtp_llm.log import VERSION, RtpAnswer, RtpGroup, RtpHeader, RtpOp
from hkv.errors import ConfigError

RtpPerform = Callable[[RtpOp], RtpAnswer]

VOCABULARY = (1, 2, 3, 0, -1)
"""Tokens in use; few, so that equal blocks occur by themselves."""

MEMORY = 10
"""Number of earlier texts that a new prompt may continue."""

MOST_WAITING, MOST_RUNNING = 4, 6


def drive_rtp(header: RtpHeader, choices: Choices, perform: RtpPerform, steps: int) -> None:
    """Performs random traffic: requests arrive, are granted or refused, grow, fork, are entered, preempted and end.

    Every operation is legal by `docs/oplog.md`; answers decide what comes next, so two engines that agree see the same
    traffic.

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
      steps: rounds; each ends with `state`.
    """
    traffic = RtpTraffic(header, choices, perform)
    for _ in range(steps):
        traffic.step()
    if choices.chance(50):
        traffic.drain()


@dataclasses.dataclass
class _Request:
    """A stream, with what it asks of the cache for as long as it lives (RTP-LLM `StreamCacheResource`)."""

    id: str
    texts: list[list[int]]
    reuse: bool
    device_cache: bool


class RtpTraffic:
    """An engine of no judgement, one round at a time, or one move at a time (`hkv.contract.traffic.Moves`).

    Args:
      header: the configuration.
      choices: source of decisions.
      perform: performs one operation and returns the answer.
    """

    def __init__(self, header: RtpHeader, choices: Choices, perform: RtpPerform) -> None:
        self._header, self._choices, self._perform = header, choices, perform
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._texts: list[list[int]] = []
        self._arrived = self._named = 0
        self._held: list[str] = []
        self._exported: list[str] = []
        self._load = choices.integer(25, 80)
        self._reserve = choices.pick((0, 0, 0, 1, 3))
        sharing = 1 if len(header.num_blocks) > 1 else len(header.groups)
        room = (min(header.num_blocks) - 1 - header.reserve_blocks) // sharing * header.block_size * header.cp_size
        self._longest = max(3, min(60, room))
        # Upstream throws where several sequences share all tokens and a window's last blocks are checked.
        checked = any(group.type == SWA and group.validate_tail_blocks for group in header.groups)
        fork = header.feature == "fork"
        self._widths = (1,) if checked else (1, 1, 2, 3) if fork else (1, 1, 1, 1, 1, 1, 2, 3)

    def step(self) -> None:
        """One round."""
        choices = self._choices
        for request in list(self._running):
            if request in self._running:
                self._continue(request)
        while choices.chance(self._load) and len(self._waiting) < MOST_WAITING:
            self._arrive()
        for request in list(self._waiting):
            if len(self._running) < MOST_RUNNING and not self._admit(request) and choices.chance(60):
                break
        if self._header.feature == "connector":
            self._connect()
        if choices.chance(8):
            self._perform(structs.EvictOp(least=choices.integer(0, 4)))
        if choices.chance(15):
            self._estimate()
        self._perform(structs.StateOp())

    def possible(self, move: str) -> bool:
        """True if there is a request that the move can be about, and the configuration is about such moves."""
        about, runs = self._header.feature, bool(self._running)
        possible = {
            "arrive": len(self._waiting) < MOST_WAITING,
            "admit": bool(self._waiting) and len(self._running) < MOST_RUNNING,
            "estimate": bool(self._waiting) or runs,
            "connect": about == "connector",
            "fork": about == "fork" and runs,
            "evict": True,
            "state": True,
        }
        return possible.get(move, runs)

    def make(self, move: str) -> None:
        """Makes a move."""
        choices = self._choices
        match move:
            case "arrive" | "estimate" | "connect":
                getattr(self, f"_{move}")()
            case "admit":
                self._admit(choices.pick(self._waiting))
            case "grow" | "fork" | "insert" | "preempt":
                getattr(self, f"_{move}")(choices.pick(self._running))
            case "end":
                self._end(choices.pick(self._running), entered=choices.chance(90))
            case "evict":
                self._perform(structs.EvictOp(least=choices.integer(0, 4)))
            case _:
                self._perform(structs.StateOp())

    def drain(self) -> None:
        """Ends all requests, and evicts all that is cached."""
        for request in list(self._running):
            self._end(request, entered=True)
        for name in self._held:
            self._perform(structs.ReleaseOp(name=name))
        for name in self._exported:
            self._perform(structs.SettleOp(name=name))
        self._perform(structs.StateOp())
        self._perform(structs.EvictOp(least=sum(self._header.num_blocks)))
        self._perform(structs.StateOp())

    def _arrive(self) -> None:
        choices = self._choices
        self._arrived += 1
        tokens = self._prompt()
        sequences = choices.pick(self._widths)
        reuse = choices.chance(88)
        texts = [list(tokens) for _ in range(sequences)]
        request = _Request(f"r{self._arrived}", texts, reuse, device_cache=reuse and choices.chance(92))
        self._waiting.append(request)
        self._perform(structs.RequestOp(id=request.id, tokens=tokens, sequences=sequences, reserve=self._reserve))

    def _prompt(self) -> list[int]:
        """A, then B, then A again: often as an earlier text began, of a length next to a multiple of a block."""
        choices = self._choices
        longest = self._longest * choices.pick((1, 1, 2, 2, 2, 2, 2, 3)) // 2
        length = choices.integer(1, longest)
        if choices.chance(60):
            unit = self._header.block_size * (self._header.cp_size if choices.chance(50) else 1)
            near = unit * choices.integer(1, max(1, longest // unit)) + choices.integer(-1, 1)
            length = max(1, min(near, longest))
        start: list[int] = []
        if self._texts and choices.chance(80):
            parent = choices.pick(self._texts)
            start = parent[: len(parent) if choices.chance(60) else choices.integer(0, len(parent))]
        if start and choices.chance(60):
            length = max(length, min(len(start) + choices.integer(0, 3), self._longest))
        tokens = [*start[:length], *self._tokens(length - len(start[:length]))]
        self._remember(tokens)
        return tokens

    def _tokens(self, count: int) -> list[int]:
        return [self._choices.pick(VOCABULARY) for _ in range(count)]

    def _remember(self, text: list[int]) -> None:
        self._texts.append(list(text))
        if len(self._texts) > MEMORY:
            del self._texts[self._choices.integer(0, MEMORY - 1)]

    def _admit(self, request: _Request) -> bool:
        answer = self._malloc(request, first=True)
        if answer.verdict == "granted":
            self._waiting.remove(request)
            self._running.append(request)
            return True
        if answer.verdict == "permanent" or self._choices.chance(15):
            self._waiting.remove(request)
            self._perform(structs.DropOp(id=request.id))
        return False

    def _malloc(self, request: _Request, *, first: bool = False) -> structs.Malloc:
        """Blocks, and on a decode server neither reuse nor the device's cache at first (RTP-LLM `initKVBlock`).

        A request that grows may count tokens that are still to come, or fewer than have come since (`incrKVBlock`).
        """
        choices, warm = self._choices, not first or self._header.prefill_cp_size == 1
        length = None
        if not first and choices.chance(10):
            length = max(1, len(request.texts[0]) + choices.integer(-3, 4))
        operation = structs.MallocOp(
            id=request.id, reuse=request.reuse and warm, device_cache=request.device_cache and warm, length=length
        )
        answer = self._perform(operation)
        assert isinstance(answer, structs.Malloc)
        return answer

    def _continue(self, request: _Request) -> None:
        choices = self._choices
        if choices.chance(20) or len(request.texts[0]) > 2 * self._longest:
            self._end(request, entered=choices.chance(90))
            return
        if choices.chance(5):
            self._preempt(request)
            return
        if choices.chance(8):
            self._insert(request)
        if self._header.feature == "fork" and choices.chance(35) and not self._fork(request):
            return
        if choices.chance(85):
            self._grow(request)

    def _grow(self, request: _Request) -> None:
        choices = self._choices
        count = choices.pick((1, 1, 1, 2, 3))
        more = [self._tokens(count) for _ in request.texts]
        for text, tokens in zip(request.texts, more, strict=True):
            text += tokens
        self._perform(structs.AppendOp(id=request.id, tokens=more))
        if self._malloc(request).verdict == "granted" or choices.chance(30):
            return
        victim = self._running[-1]
        self._preempt(victim)
        if victim is not request and choices.chance(70) and self._malloc(request).verdict != "granted":
            self._preempt(request)

    def _fork(self, request: _Request) -> bool:
        """Forks a request, whose sequences become copies of one another; True if it runs on."""
        choices, width = self._choices, len(request.texts)
        count = choices.integer(1, min(4, width + 1))
        sources = [choices.integer(0, width - 1) for _ in range(count)]
        answer = self._perform(structs.ForkOp(id=request.id, sources=sources, copy_last=choices.chance(80)))
        assert isinstance(answer, structs.Fork)
        if answer.copies is not None:
            request.texts = [list(request.texts[source]) for source in sources]
            return True
        if self._header.dialect == SINGLE or choices.chance(30):
            # What a single group's refused fork leaves has lost sequences (`fork_single`): nothing goes on from it.
            self._preempt(request)
            return False
        return True

    def _preempt(self, request: _Request) -> None:
        self._running.remove(request)
        self._perform(structs.FreeOp(id=request.id))
        if self._choices.chance(80):
            self._waiting.insert(0, request)
        else:
            self._perform(structs.DropOp(id=request.id))

    def _end(self, request: _Request, *, entered: bool) -> None:
        self._running.remove(request)
        if entered:
            self._insert(request)
        self._perform(structs.FreeOp(id=request.id))
        self._perform(structs.DropOp(id=request.id))
        self._remember(self._choices.pick(request.texts))

    def _insert(self, request: _Request) -> None:
        resident = self._header.feature == "connector" and self._choices.chance(4)
        self._perform(structs.InsertOp(id=request.id, resident=resident))

    def _connect(self) -> None:
        """Somebody holds a running sequence's blocks, or evicted ones leave for another tier; or is done with them."""
        choices = self._choices
        if self._running and choices.chance(30) and len(self._held) < 3:
            request = choices.pick(self._running)
            name = self._name("h")
            sequence = choices.integer(0, len(request.texts) - 1)
            answer = self._perform(
                structs.HoldOp(name=name, id=request.id, sequence=sequence, connector=choices.chance(80))
            )
            self._keep(self._held, name, answer)
        if choices.chance(20) and len(self._exported) < 2:
            name = self._name("e")
            self._keep(self._exported, name, self._perform(structs.ExportOp(name=name, least=choices.integer(0, 4))))
        if self._held and choices.chance(40):
            self._perform(structs.ReleaseOp(name=self._held.pop(choices.integer(0, len(self._held) - 1))))
        if self._exported and choices.chance(50):
            self._perform(structs.SettleOp(name=self._exported.pop(0)))

    def _name(self, letter: str) -> str:
        self._named += 1
        return f"{letter}{self._named}"

    def _keep(self, names: list[str], name: str, answer: RtpAnswer) -> None:
        assert isinstance(answer, structs.Selected)
        if answer.keys is not None:
            names.append(name)

    def _estimate(self) -> None:
        requests = [*self._waiting, *self._running]
        if requests:
            choices, request = self._choices, self._choices.pick(requests)
            self._perform(
                structs.PeakOp(
                    id=request.id,
                    remaining=choices.integer(0, 12),
                    reuse=choices.chance(50),
                    sequences=choices.integer(0, 3),
                )
            )


# Random configurations under RTP-LLM's rules, one family for each feature of its logs.

RTP_FEATURES = ("core", "tree", "fork", "connector", "context_parallel", "decode")
"""Features of traffic under RTP-LLM's rules; `docs/oplog.md` explains each."""

FULL, LINEAR, SWA = ("FULL", "LINEAR", "SWA")
"""Types of groups."""


def rtp_features(dialect: str) -> tuple[str, ...]:
    """Features of traffic under a dialect's rules; one group is not spread over ranks."""
    return RTP_FEATURES if dialect != SINGLE else RTP_FEATURES[:-2]


def draw_rtp_header(choices: Choices, feature: str, dialect: str) -> RtpHeader:
    """A configuration with small blocks and pools that are soon full.

    Args:
      choices: source of decisions.
      feature: one of `RTP_FEATURES`.
      dialect: one of `hkv.dialects.rtp_llm.config.NAMES`.

    Raises:
      ConfigError: unknown dialect, or a feature that it has not.
    """
    if dialect not in NAMES:
        raise ConfigError("dialect", dialect, f"one of {', '.join(NAMES)}")
    if feature not in rtp_features(dialect):
        raise ConfigError("feature", feature, f"one of {', '.join(rtp_features(dialect))} for {dialect}")
    size = choices.pick((1, 2, 4))
    ranks = choices.pick((2, 2, 4)) if feature in ("context_parallel", "decode") else 1
    own = 1 if feature == "decode" else ranks
    groups = [
        _group(choices, f"g{index}", kind, size, ranks, apart=dialect == HYBRID_POOL, checked=feature != "fork")
        for index, kind in enumerate(_types(choices, dialect))
    ]
    pools = len(groups) if dialect == HYBRID_POOL else 1
    least = 4 if pools > 1 else 3 + 2 * len(groups)
    tree = feature == "tree" or (feature != "core" and choices.chance(40))
    return RtpHeader(
        oplog=VERSION,
        dialect=dialect,
        feature=feature,
        num_blocks=[
            groups[index].explicit_block_num or choices.integer(least, choices.pick((8, 16, 40)) + least)
            for index in range(pools)
        ],
        groups=groups,
        block_size=size,
        linear_step=choices.integer(0, 3),
        reserve_blocks=choices.pick((0, 0, 1, 3)),
        prefix_tree=tree,
        independent_eviction=tree and choices.chance(50),
        cp_size=own,
        cp_rank=choices.integer(0, own - 1),
        prefill_cp_size=ranks if feature == "decode" else 1,
    )


def _types(choices: Choices, dialect: str) -> list[str]:
    """The types of the groups, at least one full group among them where one pool is shared."""
    if dialect == SINGLE:
        return [FULL]
    least = 0 if dialect == HYBRID_POOL else 1
    others = [choices.pick((LINEAR, SWA, LINEAR, SWA, FULL)) for _ in range(choices.integer(1, 2))]
    full = [FULL] if least or choices.chance(80) else []
    place = choices.integer(0, len(others))
    return [*others[:place], *full, *others[place:]]


def _group(choices: Choices, tag: str, kind: str, size: int, ranks: int, *, apart: bool, checked: bool) -> RtpGroup:
    mapping = None
    if kind == SWA and ranks > 1 and choices.chance(50):
        mapping = "NONE"
    compact = kind == SWA and ranks > 1 and mapping is None
    reuse = choices.chance(75) if kind == SWA else None
    if kind == FULL and choices.chance(4):
        reuse = False
    return RtpGroup(
        tag=tag,
        type=kind,
        block_size=size * (ranks if compact else 1),
        kernel_block_size=choices.pick((0, 1, 2)) if kind == FULL and size % 2 == 0 else 0,
        enable_prefix_reuse=reuse,
        evict_policy=choices.pick(("CHAIN", "CHAIN", "INDEPENDENT", "INDEPENDENT", "NONE")),
        explicit_block_num=choices.integer(6, 20) if apart and kind == SWA and choices.chance(20) else 0,
        active_tail_blocks=None if kind == FULL else choices.integer(0, 3),
        # A hit brings a window one block, and none without reuse. Upstream throws where two are to be there, after such
        # a hit and, with several sequences, after one that covers all that they share.
        validate_tail_blocks=kind != SWA or (checked and bool(reuse) and choices.chance(50)),
        cp_mapping=mapping,
    )
