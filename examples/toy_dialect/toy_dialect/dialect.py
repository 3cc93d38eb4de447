"""Radix cache as a dialect of HKV."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from hkv.contract.dialect import Dialect
from hkv.contract.explanation import MissingEntry, Resumption
from hkv.contract.log import LogFormat, NamedRequests, PlainHeader
from hkv.contract.traffic import Choices
from hkv.replay.plain import PlainReplayCommand
from toy_dialect.cache import RadixCache
from toy_dialect.log import FORMAT, AdmitOp, AppendOp, FreeOp, StateOp
from toy_dialect.replay import ToyReplay

CACHE = "toy_dialect.cache"


class ToyDialect(Dialect):
    """A radix cache with LRU leaves."""

    names = ("toy-radix",)
    title = "the toy radix cache"
    kinds = ("full_attention",)
    engines = MappingProxyType({"numpy": f"{CACHE}:RadixCache", "forgetful": f"{CACHE}:ForgetfulCache"})
    default_pair = ("forgetful", "numpy")

    @property
    def log(self) -> LogFormat:
        return FORMAT

    def lifecycle(self, header: PlainHeader) -> NamedRequests:
        return NamedRequests(AdmitOp, FreeOp, granted=lambda answer: answer.blocks is not None)

    def features(self, name: str) -> tuple[str, ...]:
        return ("core",)

    def draw_header(
        self, choices: Choices, feature: str, version: int, name: str, kinds: frozenset[str] = frozenset()
    ) -> PlainHeader:
        groups = [{"kind": "full_attention", "block_size": choices.integer(1, 3)}]
        return PlainHeader(dialect=name, feature=feature, num_blocks=choices.integer(3, 12), groups=groups)

    def drive(self, header: PlainHeader, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
        live, prompts = list[str](), list[list[int]]([[]])
        for _ in range(3 * steps):
            perform(StateOp())
            move = choices.pick(("admit", "append", "free"))
            new = [choices.integer(0, 2) for _ in range(choices.integer(1, 4))]
            if move == "admit" or not live:
                known, id = choices.pick(prompts), f"r{len(prompts)}"
                prompts.append(known[: choices.integer(0, len(known))] + new)
                if perform(AdmitOp(id=id, tokens=prompts[-1])).blocks is not None:
                    live.append(id)
            elif move == "append":
                perform(AppendOp(id=choices.pick(live), tokens=new))
            else:
                live.remove(id := choices.pick(live))
                perform(FreeOp(id=id, keep=choices.chance(80)))

    def resumptions(self, engine: RadixCache, operation: Any, id: str) -> tuple[Resumption, ...]:
        tokens = operation.tokens if isinstance(operation, AdmitOp) else engine.requests[id].tokens
        hit = len(engine.longest(tokens[:-1])) * engine.size
        more = hit + engine.size if hit + engine.size < len(tokens) else None
        lacks = (MissingEntry(hit, hit + engine.size - 1, "never entered, or evicted"),) if more else ()
        return (Resumption(0, "full_attention", engine.size, hit, more, lacks),)

    def replay_command(self) -> PlainReplayCommand:
        return PlainReplayCommand(ToyReplay)
