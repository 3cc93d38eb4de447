"""A hybrid prefix cache under vLLM 0.33's rules: one method for each operation of the log format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hkv.contract.bugs import check_bugs
from hkv.dialects.vllm.bugs import BUGS
from hkv.dialects.vllm.config import VllmConfig, check_encoder
from hkv.errors import EngineFailure, OperationError
from hkv.keys.chained import PLAIN, GivenKeys, KeyChain, PrefixIdentity, digest_by_name
from reference.dialects.rules import RuleSet
from reference.dialects.vllm.coordinator import Coordinator
from reference.dialects.vllm.dialect import VLLM
from reference.dialects.vllm.hit_reports import report_hit
from reference.dialects.vllm.hits import Found
from reference.dialects.vllm.kinds.kind import Demand, Kind
from reference.dialects.vllm.request import Grant, KeyedRequest, Request, TokenRequest
from reference.keys.views import Chain
from reference.state.events import Event
from reference.state.history import NAMES
from reference.state.pool import Pool

Sort = TypeVar("Sort", bound=Request)
Result = TypeVar("Result")


class Manager:
    """Requests, their rows and the pool. vLLM 0.33 `KVCacheManager` at the level of its verbs.

    A request is *waiting* from its arrival to its first granted `allocate`, and again from each `free` on; otherwise it
    is *running*. Every misuse (an unknown request, the wrong state, a negative number, a block that does not exist)
    raises `OperationError` before anything changes. A refused `allocate` is no error.

    Args:
      config: configuration of the cache.
      dialect: rules that it follows.

    Attributes:
      config: as given.
      cache: the groups and their rows.
      requests: every request that was not dropped, by name.

    Raises:
      ConfigError: the rules cannot serve this configuration.
    """

    def __init__(self, config: VllmConfig, dialect: RuleSet[type[Kind]] = VLLM) -> None:
        check_bugs(config.bugs, BUGS)
        self.config = config
        self.cache = Coordinator(config, dialect.kind)
        self.requests: dict[str, Request] = {}
        self._granted: list[Request] = []
        self._rules = dialect.rules
        self._digest = digest_by_name(config.hash)
        self._found: tuple[str, Found] | None = None

    @property
    def pool(self) -> Pool:
        """The pool that all groups draw from."""
        return self.cache.pool

    # Requests come and go.

    def step(self) -> None:
        """A new scheduling step begins."""
        self.pool.step += 1
        for request in self._granted:
            request.grant = None
        self._granted.clear()
        for kind in self.cache.kinds:
            kind.new_step()

    def request(
        self,
        id: str,
        tokens: Sequence[int],
        identity: PrefixIdentity = PLAIN,
        keys: Sequence[str] | None = None,
        session: str = "",
        reports: bool = False,
    ) -> None:
        """A request arrives, with its prompt and everything else that identifies its prefix; or its prefix keys.

        `session` is what its events name besides that; where it `reports`, its hits are events, too.
        """
        self._check_new(id, len(tokens))
        config = self.config
        chain: KeyChain | GivenKeys = GivenKeys()
        if keys is None:
            chain = KeyChain(self._digest, config.hash_block_size, config.hash_lookahead, identity, config.hash_seed)
        request = self.requests[id] = TokenRequest(id, tokens, chain, keys or ())
        request.identity, request.session, request.reports = identity, session, reports
        request.lookahead = config.hash_lookahead

    def request_keyed(self, id: str, num_tokens: int, keys: Sequence[int]) -> None:
        """A request arrives of which only its length is known, and what its prefixes are called.

        Events name tokens, which such requests do not have: from the first one on, none are recorded.

        Args:
          id: its name.
          num_tokens: tokens of its prompt.
          keys: a non-negative int for each of its hash blocks, now and later; key i names the first i + 1 of them.
        """
        self._check_new(id, num_tokens)
        config = self.config
        self.requests[id] = KeyedRequest(id, num_tokens, keys, config.hash_block_size, config.hash_lookahead)
        self.pool.records = False
        self.pool.events.clear()

    def append(self, id: str, tokens: Sequence[int], keys: Sequence[str] = ()) -> None:
        """Generated tokens are appended to a request that came with tokens; `keys` where it came with keys too."""
        request = self._of_sort(id, TokenRequest, "a request that came with tokens")
        self._check_length(request, len(tokens))
        request.append(tokens, keys)

    def extend(self, id: str, tokens: int) -> None:
        """`tokens` generated tokens are appended to a request that came with keys."""
        request = self._of_sort(id, KeyedRequest, "a request that came with keys")
        _check_not_negative(tokens=tokens)
        self._check_length(request, tokens)
        request.extend(tokens)

    def drop(self, id: str) -> None:
        """A waiting request is forgotten."""
        self._waiting(id)
        self._found = None
        del self.requests[id]
        for kind in self.cache.kinds:
            kind.forget(id)

    # The prefix cache.

    def lookup(self, id: str, limit: int | None = None) -> Found:
        """The longest hit of a waiting request that all groups agree on; `allocate` may adopt it.

        Changes nothing, but for the events of a request that reports its hits.

        Args:
          id: the request.
          limit: tokens that the hit may have; None for all but the last.

        Raises:
          OperationError: misuse.
          EngineFailure: a defect asked for by name made the engine fail.
        """
        found = self.searched(id, lambda cache, request: self._rules.hit(cache, request, limit))
        self._found = (id, found)
        report_hit(self.cache, self.requests[id], found)
        return found

    def searched(self, id: str, search: Callable[[Coordinator, Request], Result]) -> Result:
        """Result of a search of the cache for what a waiting request may resume from; arguments and errors as of
        `lookup`."""
        request = self._waiting(id)
        try:
            return search(self.cache, request)
        except IndexError as error:
            if "finder-index-error" not in self.config.bugs:
                raise
            raise EngineFailure("keys", len(request.keys), "a key for every block up to the last token") from error

    def commit(self, id: str, tokens: int, checked: bool = True) -> None:
        """The first `tokens` tokens of a running request are settled: what they filled enters the prefix cache.

        More than are computed are refused if `checked`.
        """
        request = self.running(id)
        if checked and not 0 <= tokens <= min(request.num_computed, request.num_tokens):
            expected = f"0 to {min(request.num_computed, request.num_tokens)} tokens, computed and not drafts"
            raise OperationError("tokens", tokens, expected)
        self._found = None
        self._rules.register(self.cache, request, tokens)

    def evict(self, blocks: Sequence[int]) -> None:
        """Drops the keys of these blocks. References, and places in the free queue, stay."""
        for block in blocks:
            if type(block) is not int or not 0 <= block < self.config.num_blocks:
                raise OperationError("blocks", block, f"block ids from 0 to {self.config.num_blocks - 1}")
        self._found = None
        self._rules.evict(self.cache, blocks)

    def reset(self) -> bool:
        """Empty the prefix cache; False, and nothing changes, while any block is in use."""
        self._found = None
        return self.pool.reset()

    # Blocks.

    def allocate(
        self,
        id: str,
        new: int,
        *,
        hit: int = 0,
        lookahead: int = 0,
        external: int = 0,
        delay: bool = False,
        must_fit: bool = False,
        reserved: int = 0,
        in_flight: int = 0,
        shared_prefix: int | None = None,
        rows: Sequence[Sequence[int]] | None = None,
        waiting: bool | None = None,
        scheduled: bool | None = None,
        encoder: int = 0,
        loaded: Sequence[int] = (),
    ) -> list[list[int]] | None:
        """Give a request room for its next tokens (vLLM 0.33 `KVCacheManager.allocate_slots`). Lengths are tokens.

        A refusal touches neither rows nor hits, except that a running request has retired what it no longer needs, that
        `in_flight` and `shared_prefix` hold, and that a Mamba group has planned its chunk's checkpoint.

        Args:
          id: the request.
          new: tokens to be computed, drafts included.
          hit: tokens to adopt of the `lookup` of this request just before, all of its hit; 0 adopts nothing.
          lookahead: further slots for drafts that are proposed later.
          external: tokens after the hit whose content comes from elsewhere.
          delay: register nothing yet; `commit` will.
          must_fit: refuse unless the whole request, as long as it is now, fits into what is free.
          reserved: free blocks that are promised to others.
          in_flight: computed tokens of the request whose steps have not come back.
          shared_prefix: length at which others branch off, in tokens; stays until set again.
          rows: for each group the blocks of the hit, where it is not the lookup's.
          waiting: whether the request has yet to be scheduled; None if that is when it holds no blocks.
          scheduled: whether others are; None if that is when any other holds blocks.
          encoder: tokens of an encoder's output that groups which read those get slots for.
          loaded: groups whose blocks for external tokens are not to be zeroed.

        Returns:
          For each group the blocks that are new in its row, a copy's target first; None when refused.

        Raises:
          OperationError: nothing to allocate, or misuse.
          EngineFailure: a defect asked for by name made the engine fail halfway.
        """
        request = self.find(id)
        _check_not_negative(
            new=new, hit=hit, lookahead=lookahead, external=external, reserved=reserved, in_flight=in_flight
        )
        _check_not_negative(shared_prefix=shared_prefix or 0, encoder=encoder)
        check_encoder(encoder, self.config.encoder_tokens)
        if new + hit + external == 0:
            raise OperationError("new", 0, "something to allocate: new, hit or external tokens")
        if request.running and (hit or external):
            raise OperationError("hit" if hit else "external", hit or external, "0 for a running request")
        rows = self._adopted(id, hit) if rows is None else [list(row) for row in rows]
        self._found = None
        request.num_in_flight = in_flight
        if shared_prefix is not None:
            request.shared_prefix = shared_prefix
        local = request.num_computed + hit
        headroom = self._watermark(request, waiting, scheduled)
        main = min(local + external, self.config.max_model_len) + new
        slots = min(main + lookahead, self.config.max_model_len)
        prefill_end = request.prefill_end if self.config.retention_interval == 0 else 0
        demand = Demand(slots, main, local + external, local, prefill_end, whole=False, encoder=encoder)
        if not self._admit(request, rows, demand, must_fit, reserved, headroom):
            return None
        return self._grant(request, rows, demand, delay, loaded)

    def _admit(
        self,
        request: Request,
        rows: Sequence[Sequence[int]],
        demand: Demand,
        must_fit: bool,
        reserved: int,
        free_after: int,
    ) -> bool:
        """True if the request fits, whole if it must; in between, blocks that it has outgrown are given back."""
        limit = self.config.max_model_len
        total = min(demand.total, limit)
        if must_fit:
            length = min(request.num_tokens, limit)
            whole = demand._replace(slots=length, main=length, total=total, whole=True)
            if not self._rules.admit(self.cache, request.id, rows, whole, len(self.pool.free) - free_after):
                return False
        self._rules.retire(self.cache, request.id, max(0, total - request.num_in_flight))
        free = len(self.pool.free) - reserved - free_after
        return self._rules.admit(self.cache, request.id, rows, demand, free)

    def _grant(
        self,
        request: Request,
        rows: Sequence[Sequence[int]],
        demand: Demand,
        delay: bool,
        loaded: Sequence[int],
    ) -> list[list[int]]:
        """Take the blocks, and register what the tokens will fill; drafts are not registered."""
        try:
            blocks = self._rules.allocate(self.cache, request.id, rows, demand, loaded)
        except OperationError as error:
            raise EngineFailure(error.argument, error.value, error.expected) from error
        self.note_grant(request, Grant(demand.local, joined=not request.running))
        request.running = True
        request.num_granted = demand.main
        if not delay:
            self._rules.register(self.cache, request, min(demand.main, request.num_tokens))
        return blocks

    def note_grant(self, request: Request, grant: Grant) -> None:
        """Notes what the step finds of a request that it grants blocks, the first time that it does."""
        request.grant = request.grant or grant
        self._granted.append(request)

    def _adopted(self, id: str, hit: int) -> list[list[int]]:
        """The rows of the lookup just before, when `hit` tokens of it are adopted."""
        if hit == 0:
            return [[] for _ in self.cache.kinds]
        found = self._found
        if found is None or found[0] != id or found[1].hit != hit:
            raise OperationError("hit", hit, "0, or the hit that a lookup of this request just found")
        return found[1].blocks

    def _watermark(self, request: Request, waiting: bool | None, scheduled: bool | None) -> int:
        """Blocks that stay free when a request is admitted while others run."""
        if not (not request.running if waiting is None else waiting):
            return 0
        others = any(other.running for other in self.requests.values()) if scheduled is None else scheduled
        return self.config.watermark_blocks if others else 0

    def advance(self, id: str, tokens: int) -> None:
        """`tokens` more tokens of a running request are computed; rejected drafts do not count."""
        request = self.running(id)
        room = request.num_granted - request.num_computed
        if not 0 <= tokens <= room:
            raise OperationError("tokens", tokens, f"0 to {room}, for which the request has room")
        request.num_computed += tokens

    def free(self, id: str) -> None:
        """A running request finished, or is preempted: its rows are freed, last block first, and it waits again."""
        request = self.running(id)
        self.forget_hit()
        self._rules.free(self.cache, id)
        request.wait()

    def copies(self, hold: bool = False) -> list[tuple[int, int]]:
        """Drains the pending copies, (source, target), group by group; gives back their references but to `hold`."""
        self.forget_hit()
        copies = [copy for kind in self.cache.kinds for copy in kind.take_copies()]
        self.pool.release(block for copy in copies for block in copy if not hold)
        return copies

    def forget_hit(self) -> None:
        """The last lookup's hit may be adopted no more."""
        self._found = None

    # What can be seen.

    def events(self) -> list[Event]:
        """Drains the KV events."""
        events, self.pool.events = self.pool.events, []
        return events

    def num_free(self) -> int:
        """Blocks in the free queue."""
        return len(self.pool.free)

    @property
    def evictions(self) -> int:
        """Blocks so far that lost their keys by being handed out."""
        return self.pool.evictions

    def rows(self, id: str) -> list[list[int]]:
        """The block ids of a request in each group; 0 is the null block, empty lists mean that it has none."""
        rows = (kind.rows.get(id) for kind in self.cache.kinds)
        return [[] if row is None else list(row.blocks) for row in rows]

    def absence(self, group: int, key: Chain) -> str:
        """Reason why `group` has no block for the prefix `key`, a chain key or a given one.

        Returns:
          `cached` (it has), `never seen`, `evicted`, `retired` (its block was given back before the span was
          registered) or `not retained` (its block was not worth registering).
        """
        if (group, key) in self.pool.table:
            return "cached"
        return NAMES[self.pool.history.of(group, key)]

    def eviction(self, group: int, key: Chain) -> tuple[int, int] | None:
        """The step in which `group` last lost its last block for `key`, and the group that got it.

        Steps are counted from 1, which is before the first begins. None where no block was handed out that had the key.
        """
        return self.pool.history.eviction(group, key)

    # Checks.

    def find(self, id: str) -> Request:
        """A request.

        Raises:
          OperationError: it has not arrived, or was dropped.
        """
        try:
            return self.requests[id]
        except KeyError:
            raise OperationError("id", id, "a request that arrived and was not dropped") from None

    def _waiting(self, id: str) -> Request:
        request = self.find(id)
        if request.running:
            raise OperationError("id", id, "a waiting request, one that holds no blocks")
        return request

    def running(self, id: str) -> Request:
        """A request that holds blocks.

        Raises:
          OperationError: it does not, or has not arrived.
        """
        request = self.find(id)
        if not request.running:
            raise OperationError("id", id, "a running request, one that was granted blocks")
        return request

    def _of_sort(self, id: str, sort: type[Sort], expected: str) -> Sort:
        request = self.find(id)
        if not isinstance(request, sort):
            raise OperationError("id", id, expected)
        return request

    def _check_new(self, id: str, num_tokens: int) -> None:
        if id in self.requests:
            raise OperationError("id", id, "a name that no request has")
        if not 1 <= num_tokens <= self.config.max_model_len:
            raise OperationError("tokens", num_tokens, f"1 to max_model_len {self.config.max_model_len} tokens")

    def _check_length(self, request: Request, more: int) -> None:
        room = self.config.max_model_len - request.num_tokens
        if more > room:
            raise OperationError("tokens", more, f"at most {room}: max_model_len is {self.config.max_model_len}")


def _check_not_negative(**numbers: int) -> None:
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise OperationError(name, value, "an integer of at least 0")
