"""SGLang as a dialect: where everything that HKV asks of it stands."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from hkv.contract.dialect import Dialect
from hkv.contract.explanation import MissingEntry, Resumption
from hkv.contract.explore_command import TOKENS, Space
from hkv.contract.invariant import judged
from hkv.dialects.sglang import log as structs
from hkv.dialects.sglang.config import BUGS
from hkv.dialects.sglang.engines import places
from hkv.dialects.sglang.traffic import FEATURES, MOVES
from hkv.errors import ConfigError
from hkv.limits import counted

if TYPE_CHECKING:
    from hkv.contract.answer import Mismatch
    from hkv.contract.attach import Observed, Session
    from hkv.contract.case import ShrinkRules
    from hkv.contract.invariant import Invariant, PlainWatch
    from hkv.contract.log import Log, LogFormat
    from hkv.contract.snapshot import Snapshot
    from hkv.contract.traffic import Choices
    from hkv.dialects.sglang.engines.numpy import SGLangNumpyEngine
    from hkv.dialects.sglang.lifecycle import SGLangLifecycle, TreeLifecycle
    from hkv.dialects.sglang.replay_command import SGLangReplay
    from hkv.dialects.sglang.traffic import SGLangTraffic

LOST = {
    structs.SLIDING_WINDOW: ("SWA", "its window slots were freed"),
    structs.STATES: ("MAMBA", "no state of this length is kept"),
}
"""Components by their kinds of groups, and what full attention has and they have not."""


class SGLangDialect(Dialect):
    """SGLang's rules. Modules are imported when they are asked for."""

    names = (structs.NAME,)
    title = "SGLang 0.5.23"
    kinds = structs.KINDS
    engines = MappingProxyType(
        {
            "numpy": "hkv.dialects.sglang.engines.numpy:engine",
            "jax": "hkv.dialects.sglang.engines.jax:SGLangJaxEngine",
            "sglang": "hkv.dialects.sglang.engines.installed:python",
            "sglang-rust": "hkv.dialects.sglang.engines.installed:rust",
        }
    )
    engine_versions = MappingProxyType({"sglang": "0.5.23", "sglang-rust": "0.5.23"})
    default_pair = ("sglang", "numpy")
    bugs = BUGS
    move_names = MOVES

    @property
    def log(self) -> LogFormat:
        return structs.FORMAT

    def lifecycle(self, header: structs.Header) -> SGLangLifecycle | TreeLifecycle:
        from hkv.dialects.sglang.lifecycle import SGLangLifecycle, TreeLifecycle

        return TreeLifecycle(header) if header.tree else SGLangLifecycle(header)

    @property
    def shrink_rules(self) -> ShrinkRules:
        from hkv.dialects.sglang.shrink_rules import SHRINK_RULES

        return SHRINK_RULES

    def features(self, name: str) -> tuple[str, ...]:
        return FEATURES

    def draw_header(
        self, choices: Choices, feature: str, version: int, name: str, kinds: frozenset[str] = frozenset()
    ) -> structs.Header:
        from hkv.dialects.sglang.traffic import draw_header

        return draw_header(choices, feature, name, kinds)

    def drive(self, header: structs.Header, choices: Choices, perform: Callable[[Any], Any], steps: int) -> None:
        from hkv.dialects.sglang.traffic import drive

        drive(header, choices, perform, steps)

    def moves(self, header: structs.Header, choices: Choices, perform: Callable[[Any], Any]) -> SGLangTraffic:
        from hkv.dialects.sglang.traffic import SGLangTraffic

        return SGLangTraffic(header, choices, perform)

    @property
    def capabilities(self) -> Mapping[str, str]:
        return {"tree": "the nodes of the tree, and the order of their window slots"}

    def without(self, answer: Any, lacks: frozenset[str]) -> Any:
        if "tree" in lacks and isinstance(answer, structs.State):
            return msgspec.structs.replace(answer, nodes=None, recent=None)
        return answer

    def compare(self, want: Any, got: Any, version: int) -> Mismatch | None:
        """As in every dialect; of a state, what a log does not tell is not compared: ledgers, which came later, and the
        tree of a core that does not show it."""
        if isinstance(want, structs.State) and isinstance(got, structs.State):
            untold = [name for name in ("nodes", "recent", "ledgers") if getattr(want, name) is None]
            got = msgspec.structs.replace(got, **dict.fromkeys(untold))
        return super().compare(want, got, version)

    @property
    def invariants(self) -> Mapping[str, Invariant]:
        from reference.dialects.sglang.invariants import INVARIANTS

        return INVARIANTS

    def watch(self, engine: Any, header: structs.Header) -> PlainWatch:
        from reference.dialects.sglang.invariants.moment import Watch

        if header.tree:
            raise self.unsupported("invariants of a tree alone, which logs of live caches are about")
        asked = judged(self.invariants.values(), self.missing_capabilities(engine))
        return Watch(engine, header, asked, structs.StateOp())

    def snapshot(self, header: structs.Header, state: Any) -> Snapshot:
        from hkv.dialects.sglang.snapshot import snapshot

        return snapshot(header, state)

    @property
    def coverage(self) -> Mapping[str, str]:
        from hkv.dialects.sglang.coverage import RULES

        return RULES

    def exercised(self, log: Any) -> dict[str, int]:
        from hkv.dialects.sglang.coverage import exercised

        return exercised(log)

    attached_package = "sglang"

    def ended(self, log: Log) -> str:
        last = log.operations[-1] if log.operations else None
        return last.reason if isinstance(last, structs.EndedOp) else ""

    def attach(self, target: Any, session: Session) -> Observed:
        from hkv.dialects.sglang.attach import attach

        return attach(target, session)

    def attach_all(self, session: Session) -> Callable[[], None]:
        from hkv.dialects.sglang.attach import attach_all

        return attach_all(session)

    def refuses(self, answer: Any) -> bool:
        return isinstance(answer, structs.Slots) and answer.slots is None

    def replay_command(self) -> SGLangReplay:
        from hkv.dialects.sglang.replay_command import SGLangReplay

        return SGLangReplay()

    def resumptions(self, engine: SGLangNumpyEngine, operation: Any, id: str) -> Sequence[Resumption]:
        if isinstance(operation, structs.AdmitOp) and operation.id == id:
            tokens, namespace = operation.tokens, operation.namespace
        else:
            request = engine.manager.requests[id]
            tokens, namespace = request.tokens, request.namespace
        size, full = engine.manager.config.page_size, engine.alone(tokens[:-1], namespace, "FULL")
        beyond = full + size if full + size < len(tokens) else None
        absent = (MissingEntry(full, full + size - 1, "never entered, or evicted"),) if beyond else ()
        found = [Resumption(0, structs.FULL_ATTENTION, size, full, beyond, absent)]
        for number, group in enumerate(engine.header.groups[1:], start=1):
            name, why = LOST[group["kind"]]
            length = engine.alone(tokens[:-1], namespace, name)
            gone = (MissingEntry(length, full - 1, why),) if length < full else absent
            found.append(Resumption(number, group["kind"], size, length, full if length < full else beyond, gone))
        return found

    def next_operations(self, engine: SGLangNumpyEngine, space: Space) -> Iterator[Any]:
        _check_states(engine.manager.config.states, space.requests)
        requests = engine.manager.requests
        free = next((name for name in space.names() if name not in requests), None)
        if free is not None:
            yield from (structs.AdmitOp(id=free, tokens=tokens) for tokens in space.prompts())
        for id, request in requests.items():
            computed, known = len(request.row), len(request.tokens)
            yield from (structs.ExtendOp(id=id, length=length) for length in range(computed + 1, known + 1))
            if computed == known and known < space.max_model_len:
                yield from (structs.DecodeOp(id=id, token=token) for token in TOKENS)
            window, lock = engine.manager.config.window, request.lock
            if computed == known and window is not None:
                yield structs.SlideOp(id=id)
            if window is not None and lock.mark and not lock.window_released and computed - request.protected >= window:
                yield structs.ReleaseWindowOp(id=id)
            if request.ran:
                yield structs.CheckpointOp(id=id)
                yield structs.FinishOp(id=id)
            yield structs.AbortOp(id=id)

    def canonical(self, engine: SGLangNumpyEngine) -> Hashable:
        """Pages count, but not which they are; of requests, not what they are called; hits and ages only as far as the
        policy reads them. 128 bits stand for it all, so that millions can be remembered."""
        manager, tree, mapped = engine.manager, engine.manager.tree, engine.manager.pools.window_of
        policy, walked = manager.config.policy, [tree.root, *engine.walk()]
        numbers = {node: number for number, node in enumerate(walked)}
        used, made = places(node.used for node in walked), places(node.made for node in walked)
        read = {"slru": lambda hits: min(hits, 2), "lfu": lambda hits: hits}.get(policy, lambda hits: 0)
        nodes = [
            (
                *(node.parent and numbers[node.parent], node.key.namespace, node.key.units, node.window is None),
                *(node.state is None, node.full_locks, node.window_locks, node.state_locks, node.mark is None),
                *(used[node.used], read(node.hits), node.priority if policy == "priority" else 0),
                made[node.made] if policy in ("fifo", "filo") else 0,
            )
            for node in walked
        ]
        requests = [
            (
                *(request.tokens, request.prompt, request.priority, request.branch, len(request.row)),
                *(request.protected, request.counted, request.evicted, request.ran, request.own is None),
                *(request.tracked, request.tracked_before, len(request.tracking)),
                [slot in mapped for slot in request.row],
                *(numbers[request.lock.node], request.lock.window_released),
                [number for node, number in numbers.items() if node.mark == request.lock.mark is not None],
            )
            for request in manager.requests.values()
        ]
        orders = [[numbers[node] for node in order] for order in (tree.recent, tree.recent_states)]
        free = [(len(pool.free), len(pool.waiting)) for pool in manager.pools.all]
        encoded = sorted(map(msgspec.msgpack.encode, requests))
        return hashlib.blake2b(msgspec.msgpack.encode((nodes, encoded, orders, free)), digest_size=16).digest()


def _check_states(states: int | None, requests: int) -> None:
    """A request holds its own state and one of the tree's, and one is copied where it is entered.

    With fewer SGLang stops ("Can not alloc mamba cache"); it runs a third as many requests as there are states
    (`resolve_max_num_reqs`).
    """
    if states is not None and states < 2 * requests + 1:
        expected = f"{2 * requests + 1} at least, for the states of {counted(requests, 'request')}"
        raise ConfigError("num_blocks", states, expected)
