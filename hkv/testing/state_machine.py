"""A rule-based state machine that drives any engine, with every invariant asked after each operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hkv.contract import registry
from hkv.contract.traffic import Moves
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


class EngineMachine(RuleBasedStateMachine):
    """An engine under watch, driven by a dialect's moves; `engine_machine` makes a rule of each."""

    traffic: Moves
    choices: _Choices

    def begin(self, engine: Any, header: Any, data: Drawing) -> None:
        """An empty cache under watch, after the first move."""
        dialect = registry.dialect_of(header.dialect)
        self.choices = _Choices(data)
        self.traffic = dialect.moves(header, self.choices, dialect.watch(engine, header).perform)
        self.traffic.make(dialect.move_names[0])


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
    return type("Machine", (EngineMachine,), {"start": started, **{name: _rule(name) for name in rules.move_names}})


def _rule(move: str) -> Any:
    def make(self: EngineMachine, data: Drawing) -> None:
        self.choices.redirect(data)
        self.traffic.make(move)

    make.__name__ = move
    return precondition(lambda self: self.traffic.possible(move))(rule(data=st.data())(make))
