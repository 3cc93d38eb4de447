"""The cache as a dialect of HKV."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from hkv.contract.dialect import Dialect
from hkv.contract.explanation import MissingEntry, Resumption
from hkv.contract.explore_command import TOKENS, Space
from hkv.contract.invariant import Invariant, PlainMoment, PlainWatch, Register
from hkv.contract.log import LogFormat, NamedRequests, PooledHeader
from hkv.contract.snapshot import PoolSnapshot, Snapshot
from hkv.contract.traffic import Choices
from two_pools.cache import FULL, WINDOW, Node, RadixPools
from two_pools.log import FORMAT, AdmitOp, AppendOp, FreeOp, State, StateOp
from two_pools.replay import PoolsReplay

CACHE = "two_pools.cache"
INVARIANTS = Register("two-pools")


@INVARIANTS.invariant("blocks are somewhere")
def blocks_are_somewhere(moment: PlainMoment) -> Iterator[str]:
    """Each block of each pool is free, cached or held, and in one place only."""
    for pool, count in enumerate(moment.header.num_blocks):
        cached = [page[pool] for page in moment.after.cached if page[pool] >= 0]
        if sorted([*moment.after.free[pool], *cached, *moment.after.held[pool]]) != list(range(count)):
            yield f"blocks of pool {pool} are not each in one place"


@INVARIANTS.invariant("windows are there")
def windows_are_there(moment: PlainMoment) -> Iterator[str]:
    """A page whose window somebody reads has its block."""
    if any(block < 0 for block in moment.after.read):
        yield "a request reads a window's block that is gone"


class TwoPools(Dialect):
    """A radix cache of two pools."""

    names = ("two-pools",)
    title = "the cache of two pools"
    kinds = ("full_attention", "sliding_window")
    engines = MappingProxyType({"numpy": f"{CACHE}:RadixPools", "careless": f"{CACHE}:CarelessPools"})
    default_pair = ("careless", "numpy")

    @property
    def log(self) -> LogFormat:
        return FORMAT

    @property
    def invariants(self) -> Mapping[str, Invariant]:
        return INVARIANTS

    def watch(self, engine: Any, header: PooledHeader) -> PlainWatch:
        return PlainWatch(engine, header, INVARIANTS.values(), StateOp())

    def lifecycle(self, header: PooledHeader) -> NamedRequests:
        return NamedRequests(AdmitOp, FreeOp, granted=lambda answer: answer.blocks is not None)

    def features(self, name: str) -> tuple[str, ...]:
        return ("core",)

    def draw_header(
        self, choices: Choices, feature: str, version: int, name: str, kinds: frozenset[str] = frozenset()
    ) -> PooledHeader:
        size = choices.integer(1, 2)
        window = {"kind": "sliding_window", "block_size": size, "window": choices.integer(2, 4)}
        groups = [{"kind": "full_attention", "block_size": size}, window]
        blocks = [choices.integer(4, 12), choices.integer(3, 8)]
        return PooledHeader(dialect=name, feature=feature, num_blocks=blocks, groups=groups)

    def drive(self, header: PooledHeader, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
        live, prompts = list[str](), list[list[int]]([[]])
        for _ in range(3 * steps):
            perform(StateOp())
            move = choices.pick(("admit", "append", "free"))
            new = [choices.integer(0, 1) for _ in range(choices.integer(1, 4))]
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

    def resumptions(self, engine: RadixPools, operation: Any, id: str) -> tuple[Resumption, ...]:
        tokens = operation.tokens if isinstance(operation, AdmitOp) else engine.requests[id].tokens
        path, size = engine.walk(tokens[:-1]), engine.size
        full, window = len(path) * size, len(engine.longest(path)) * size
        more = full + size if full + size < len(tokens) else None
        lacks = (MissingEntry(full, full + size - 1, "never entered, or evicted"),) if more else ()
        lost = (MissingEntry(window, full - 1, "its window's blocks were evicted"),) if window < full else ()
        return (
            Resumption(0, "full_attention", size, full, more, lacks),
            Resumption(1, "sliding_window", size, window, full if lost else more, lost or lacks),
        )

    def snapshot(self, header: PooledHeader, state: State) -> Snapshot:
        rows = zip(("full attention", "window"), header.num_blocks, state.free, strict=True)
        pools = tuple(PoolSnapshot(name, range(count), free) for name, count, free in rows)
        held = {(pool, block): 1 for pool in (FULL, WINDOW) for block in state.held[pool]}
        pages = {(pool, page[pool]): page for page in state.cached for pool in (FULL, WINDOW) if page[pool] >= 0}
        users = {(pool, block): page[3 + pool] for (pool, block), page in pages.items()}
        entries = {at: (at[0], -1, f"page {page[FULL]}") for at, page in pages.items()}
        return Snapshot(pools, {}, held | users, entries)

    def next_operations(self, engine: RadixPools, space: Space) -> Iterator[Any]:
        free = next((name for name in space.names() if name not in engine.requests), None)
        if free is not None:
            yield from (AdmitOp(id=free, tokens=tokens) for tokens in space.prompts())
        for id, request in engine.requests.items():
            if len(request.tokens) < space.max_model_len:
                yield from (AppendOp(id=id, tokens=[token]) for token in TOKENS)
            yield from (FreeOp(id=id, keep=keep) for keep in (True, False))

    def canonical(self, engine: RadixPools) -> Hashable:
        ranks = {used: rank for rank, used in enumerate(sorted({node.used for node in engine.nodes()}))}

        def named(node: Node) -> Hashable:
            children = tuple((page, named(child)) for page, child in sorted(node.children.items()))
            return (*node.blocks, *node.users, ranks[node.used], children)

        requests = sorted(
            (request.tokens, [node.blocks[FULL] for node in request.path], request.blocks)
            for request in engine.requests.values()
        )
        return named(engine.root), repr(requests)

    def refuses(self, answer: Any) -> bool:
        return answer is not None and answer.blocks is None

    def replay_command(self) -> PoolsReplay:
        return PoolsReplay()
