"""SGLang as a dialect: where everything that HKV asks of it stands."""

from __future__ import annotations

import collections
import contextlib
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
from hkv.dialects.sglang.traffic import FEATURES, MOVES
from hkv.errors import ConfigError, OperationError
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
        from reference.dialects.sglang import clauses

        return {name: clause.meaning for name, clause in clauses().items()}

    def exercised(self, log: Any) -> dict[str, int]:
        from hkv.dialects.sglang.engines.numpy import engine
        from reference.language import recording

        counts: collections.Counter[str] = collections.Counter()
        asked = engine(log.header)
        with recording(lambda name: counts.update([name])):
            for operation in log.operations:
                with contextlib.suppress(OperationError):
                    asked.perform(operation)
        return dict(counts)

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
            tokens, namespace = engine.requests[id].tokens, engine.requests[id].namespace
        size, full = engine.config.page_size, engine.alone(tokens[:-1], namespace, "FULL")
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
        _check_states(engine.config.states, space.requests)
        free = next((name for name in space.names() if name not in engine.requests), None)
        if free is not None:
            yield from (structs.AdmitOp(id=free, tokens=tokens) for tokens in space.prompts())
        window, size = engine.config.window, engine.config.page_size
        for id in engine.requests:
            request = engine.request(id)
            computed, known = request.length, request.tokens
            yield from (structs.ExtendOp(id=id, length=length) for length in range(computed + 1, known + 1))
            if computed == known and known < space.max_model_len:
                yield from (structs.DecodeOp(id=id, token=token) for token in TOKENS)
            if computed == known and window is not None:
                yield structs.SlideOp(id=id)
            passed = computed - request.protected * size
            if window is not None and request.edge and not request.window_released and passed >= window:
                yield structs.ReleaseWindowOp(id=id)
            if request.ran:
                yield structs.CheckpointOp(id=id)
                yield structs.FinishOp(id=id)
            yield structs.AbortOp(id=id)

    def canonical(self, engine: SGLangNumpyEngine) -> Hashable:
        """Pages count, but not which they are; of requests, not what they are called; hits and ages only as far as the
        policy reads them. 128 bits stand for it all, so that millions can be remembered."""
        cache, policy = engine.cache, engine.config.policy
        state = engine.perform(structs.StateOp())
        read = {"slru": lambda hits: min(hits, 2), "lfu": lambda hits: hits}.get(policy, lambda hits: 0)
        nodes = [
            (
                *(node.parent, node.namespace, node.tokens, node.window is None, node.state is None, node.locks),
                *(node.mark, node.used, read(node.hits), node.priority if policy == "priority" else 0),
                node.made if policy in ("fifo", "filo") else 0,
            )
            for node in state.nodes
        ]
        numbers = {node.row: number for number, node in enumerate(engine.reader.walk(cache))}
        requests = [
            (
                *(host.tokens, host.namespace, request.prompt, request.priority, request.branch, request.length),
                *(request.protected, request.entered, request.slid, request.ran, request.own == 0),
                *(request.tracked, request.tracked_before, request.kept_first == 0),
                [cache.peer[page] > 0 for page in request.row[: -(-request.length // engine.config.page_size)]],
                *(numbers.get(request.held, -1), request.window_released),
                [number for node, number in numbers.items() if node.mark == request.edge > 0],
            )
            for id, host in engine.requests.items()
            for request in (engine.request(id),)
        ]
        free = [(len(pool.free), len(pool.waiting)) for pool in state.pools]
        encoded = sorted(map(msgspec.msgpack.encode, requests))
        return hashlib.blake2b(msgspec.msgpack.encode((nodes, encoded, state.recent, free)), digest_size=16).digest()


def _check_states(states: int | None, requests: int) -> None:
    """A request holds its own state and one of the tree's, and one is copied where it is entered.

    With fewer SGLang stops ("Can not alloc mamba cache"); it runs a third as many requests as there are states
    (`resolve_max_num_reqs`).
    """
    if states is not None and states < 2 * requests + 1:
        expected = f"{2 * requests + 1} at least, for the states of {counted(requests, 'request')}"
        raise ConfigError("num_blocks", states, expected)
