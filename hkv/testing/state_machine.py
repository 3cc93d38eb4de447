"""A rule-based state machine that drives any engine, with every invariant asked after each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hkv.contract import registry
from hkv.contract.traffic import Moves
from hkv.errors import MissingExtraError, UnsupportedConfigError
from hkv.oracle.account import small
from hkv.oracle.broken_invariant import Watching
from hkv.oracle.record import ALL, Only
from hkv.oracle.shrink import repaired
from hkv.testing.strategies import Drawing, HypothesisChoices, headers
from hkv.testing.watched import accounted

try:
    from hypothesis import Phase, Verbosity, reject, settings
    from hypothesis import strategies as st
    from hypothesis.stateful import (
        RuleBasedStateMachine,
        initialize,
        precondition,
        rule,
        run_state_machine_as_test,
    )
except ImportError:
    raise MissingExtraError("hypothesis", "testing", "for a state machine") from None


class _Choices(HypothesisChoices):
    """Decisions drawn from whatever the rule at hand draws from."""

    def redirect(self, data: Drawing) -> None:
        """Draws from another object from now on."""
        self._data = data


class EngineMachine(RuleBasedStateMachine):
    """An engine under watch, driven by a dialect's moves; `engine_machine` makes a rule of each.

    Traffic that breaks an invariant is made small by the rules of the dialect, so that Hypothesis need not shrink what
    it drew; the error's note tells it.
    """

    factory: Callable[[Any], Any]
    traffic: Moves
    choices: _Choices
    told: dict[bytes, Exception]

    def begin(self, engine: Any, header: Any, data: Drawing) -> None:
        """An empty cache under watch, after the first move."""
        dialect, operations = registry.dialect_of(header.dialect), list[Any]()
        self.choices, self._error = _Choices(data), None
        watch = dialect.watch(engine, header)

        def perform(operation: Any) -> Any:
            operations.append(operation)
            try:
                return watch.perform(operation)
            except Exception as error:
                self._error = self._accounted(header, operations) or error
                raise

        self.traffic = dialect.moves(header, self.choices, perform)
        self.make(dialect.move_names[0])

    def make(self, move: str) -> None:
        """Makes a move; raises the error of the small case where an invariant breaks."""
        try:
            self.traffic.make(move)
        except Exception:
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error

    def _accounted(self, header: Any, operations: Sequence[Any]) -> Exception | None:
        """The error of what breaks along operations, made small; None where nothing breaks once more."""
        key, factory = msgspec.json.encode((header, operations)), type(self).factory
        if key not in self.told:
            watching = Watching(factory, Only(dialect=header.dialect))
            found = watching.along("machine", None, header, repaired(header, operations))
            if found is None:
                return None
            self.told[key] = accounted(factory, small(factory, found))
        return self.told[key]


def engine_machine(
    factory: Callable[[Any], Any], features: Sequence[str] = (), version: int = 2, only: Only = ALL
) -> type[EngineMachine]:
    """A state machine for an engine; `engine_machine(MyEngine).TestCase` is a test case for pytest or unittest.

    Args:
      factory: makes an empty engine of a header.
      features: features of the configurations, of the dialect's `features`; none for all of them.
      version: of the log format, which limits what headers may ask for.
      only: selection of the configurations, and their dialect, for an engine that implements some kinds or numbers of
        groups.

    A configuration for which the engine raises `UnsupportedConfigError` is left out; if too many are, Hypothesis fails.

    Raises:
      ConfigError: there is no such dialect.
      UnsupportedConfigError: the dialect has no moves.
    """
    rules = registry.dialect_of(only.dialect)
    if not rules.move_names:
        raise rules.unsupported("moves")

    def start(self: EngineMachine, header: Any, data: Drawing) -> None:
        try:
            engine = factory(header)
        except UnsupportedConfigError:
            reject()
        self.begin(engine, header, data)

    started = initialize(header=headers(features, version, only), data=st.data())(start)
    parts = {"factory": staticmethod(factory), "told": {}, "start": started}
    machine = type("Machine", (EngineMachine,), {**parts, **{name: _rule(name) for name in rules.move_names}})

    def run(self: Any) -> None:
        kept = [phase for phase in self.settings.phases if phase not in (Phase.shrink, Phase.explain)]
        quiet = Verbosity.quiet if self.settings.verbosity == Verbosity.normal else self.settings.verbosity
        run_state_machine_as_test(machine, settings=settings(self.settings, phases=kept, verbosity=quiet))

    run.is_hypothesis_test = True  # type: ignore[attr-defined]
    machine.TestCase.runTest = run
    return machine


def _rule(move: str) -> Any:
    def make(self: EngineMachine, data: Drawing) -> None:
        self.choices.redirect(data)
        self.make(move)

    make.__name__ = move
    return precondition(lambda self: self.traffic.possible(move))(rule(data=st.data())(make))
