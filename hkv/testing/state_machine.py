"""A rule-based state machine that drives any engine, with every invariant asked after each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hkv.dialects.vllm.engines.engine import Engine
from hkv.dialects.vllm.invariants import Watch
from hkv.dialects.vllm.log import structs as oplog
from hkv.dialects.vllm.log.structs import Header
from hkv.dialects.vllm.traffic.headers import FEATURES
from hkv.dialects.vllm.traffic.traffic import Traffic
from hkv.errors import MissingExtraError, UnsupportedConfigError
from hkv.oracle.record import ALL, Only
from hkv.testing.strategies import Drawing, HypothesisChoices, headers

try:
    from hypothesis import reject
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
except ImportError:
    raise MissingExtraError("hypothesis", "testing", "for a state machine") from None


class _Choices(HypothesisChoices):
    """Decisions drawn from whatever the rule at hand draws from."""

    def redirect(self, data: Drawing) -> None:
        """Draws from another object from now on."""
        self._data = data


class _Scheduler(Traffic):
    """Traffic of which each move can be made by itself."""

    @property
    def waits(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    @property
    def runs(self) -> bool:
        """Whether a request runs."""
        return bool(self._running)

    def arrive(self) -> None:
        """A request arrives; now and then with the prompt of an earlier one."""
        self._arrive()

    def admit(self) -> None:
        """A waiting request is looked up and allocated, or refused."""
        self._admit(self._choices.pick(self._waiting))

    def go_on(self) -> None:
        """A running request computes on, finishes, or is preempted for another."""
        self._continue(self._choices.pick(self._running))

    def finish(self) -> None:
        """A running request ends."""
        self._finish(self._choices.pick(self._running))

    def preempt(self) -> None:
        """A running request gives back all it has."""
        self._preempt(self._choices.pick(self._running))

    def evict(self) -> None:
        """Some blocks lose their keys."""
        self._evict()

    def next_step(self) -> None:
        """Everything is read, and a new scheduling step begins."""
        if self._copying:
            self._perform(oplog.CopiesOp())
        for operation in (oplog.EventsOp(), oplog.StateOp(), oplog.StepOp()):
            self._perform(operation)

    def reset(self) -> None:
        """The prefix cache is reset; refused while a block is in use."""
        self._perform(oplog.ResetOp())


class EngineMachine(RuleBasedStateMachine):
    """The rules; `engine_machine` gives them an engine and configurations."""

    scheduler: _Scheduler
    choices: _Choices

    def begin(self, engine: Engine, header: Header, data: Drawing) -> None:
        """An empty cache under watch, in its first scheduling step."""
        self.choices = _Choices(data)
        self.scheduler = _Scheduler(header, self.choices, Watch(engine, header).perform)
        self.scheduler.next_step()

    @rule(data=st.data())
    def arrive(self, data: Drawing) -> None:
        self.choices.redirect(data)
        self.scheduler.arrive()

    @precondition(lambda self: self.scheduler.waits)
    @rule(data=st.data())
    def admit(self, data: Drawing) -> None:
        self.choices.redirect(data)
        self.scheduler.admit()

    @precondition(lambda self: self.scheduler.runs)
    @rule(data=st.data())
    def go_on(self, data: Drawing) -> None:
        self.choices.redirect(data)
        self.scheduler.go_on()

    @precondition(lambda self: self.scheduler.runs)
    @rule(data=st.data())
    def finish(self, data: Drawing) -> None:
        self.choices.redirect(data)
        self.scheduler.finish()

    @precondition(lambda self: self.scheduler.runs)
    @rule(data=st.data())
    def preempt(self, data: Drawing) -> None:
        self.choices.redirect(data)
        self.scheduler.preempt()

    @rule(data=st.data())
    def evict(self, data: Drawing) -> None:
        self.choices.redirect(data)
        self.scheduler.evict()

    @rule()
    def next_step(self) -> None:
        self.scheduler.next_step()

    @rule()
    def reset(self) -> None:
        self.scheduler.reset()


def engine_machine(
    factory: Callable[[Header], Engine], features: Sequence[str] = FEATURES, version: int = 2, only: Only = ALL
) -> type[EngineMachine]:
    """A state machine for an engine; `engine_machine(MyEngine).TestCase` is a test case for pytest or unittest.

    Args:
      factory: makes an empty engine of a header.
      features: what configurations are about, see `hkv.dialects.vllm.traffic.headers.FEATURES`.
      version: of the log format, which says what headers may ask for.
      only: which of the configurations are drawn, for an engine that implements some kinds or numbers of groups.

    A configuration for which the engine raises `UnsupportedConfigError` is left out; if too many are, Hypothesis fails.
    """

    class Machine(EngineMachine):
        @initialize(header=headers(features, version, only), data=st.data())
        def start(self, header: Header, data: Drawing) -> None:
            try:
                engine = factory(header)
            except UnsupportedConfigError:
                reject()
            self.begin(engine, header, data)

    return Machine
