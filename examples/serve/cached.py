"""One step's cache as a model's layers see it: attention over pages, and recurrences that go on from kept states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hkv import serving

State = Mapping[str, jax.Array]


class Cached:
    """The cache during one step; what a query sees is not said, as the layer's kind is in the plan.

    Attributes:
      served: the cache; layers that write replace it.
      turn: the step's metadata.
      drafts: int32[Q], tokens at each query's end whose states are not kept.
      axis: mesh axis whose ranks hold a share of the heads each; None for one rank. See `attend`.
    """

    def __init__(self, served: serving.Serving, turn: serving.Turn, drafts: jax.Array, axis: str | None = None) -> None:
        self.served, self.turn, self.drafts, self.axis = served, turn, drafts, axis

    def attend(
        self, layer: int, query: jax.Array, parts: State, *, sinks: jax.Array | None = None, **settings: Any
    ) -> jax.Array:
        """Writes the parts of a layer's pages (keys and values, or latents), and attends to what is cached.

        On ranks that share the heads, each writes and reads those in its pool, and all get the output of all heads.
        Where there are fewer key heads than ranks, several ranks hold the same one, as in vLLM.
        """
        name, heads = f"layers.{layer}", query.shape[1]
        if self.axis:
            query = self._share(query, heads // lax.axis_size(self.axis))
            parts = {part: self._share(array, self._held(name, part)) for part, array in parts.items()}
            sinks = None if sinks is None else self._share(sinks[None], query.shape[1])[0]
        self.served = serving.write(self.served, name, self.turn, parts)
        found = serving.attend(self.served, name, self.turn, query, sinks=sinks, **settings)
        if not self.axis:
            return found
        whole = lax.pcast(jnp.zeros((len(found), heads, found.shape[2])), self.axis, to="varying")
        first = lax.axis_index(self.axis) * query.shape[1]
        return lax.psum(lax.dynamic_update_slice_in_dim(whole, found, first, 1), self.axis)

    def recur(self, layer: int, step: Callable[[Any, Any], Any], inputs: Any) -> Any:
        """Outputs of every token of a recurrent layer, each from the state that the one before it left.

        Args:
          layer: its index.
          step: `(state, one token's inputs) -> (state, output)`; a state is the page's parts by name.
          inputs: a pytree of arrays, each with the tokens as its first axis.
        """
        name, ends = f"layers.{layer}", self.turn.cu_q_lens[1:]
        before = serving.read_state(self.served, name, self.turn)
        token = jnp.arange(len(self.turn.positions))
        row = jnp.minimum(jnp.searchsorted(ends, token, side="right"), len(ends) - 1)
        live, kept = self.turn.positions >= 0, token < (ends - self.drafts)[row]

        def one(states: tuple[State, State], at: Any) -> tuple[tuple[State, State], Any]:
            row, live, kept, given = at
            state, output = step({part: array[row] for part, array in states[0].items()}, given)

            def placed(states: State, there: jax.Array) -> State:
                place = jnp.where(there, row, len(ends))
                return {part: array.at[place].set(state[part], mode="drop") for part, array in states.items()}

            return (placed(states[0], live), placed(states[1], live & kept)), output

        (_, states), outputs = lax.scan(one, (before, before), (row, live, kept, inputs))
        self.served = serving.write_state(self.served, name, self.turn, states)
        return outputs

    def _held(self, layer: str, part: str) -> int:
        """Heads of a part in one rank's pages."""
        layout = self.served.layer(layer).layout
        return next(each.heads for each in layout.content if each.name == part) or layout.shape[2]

    def _share(self, heads: jax.Array, held: int) -> jax.Array:
        """This rank's of `[tokens, heads, ...]`."""
        first = lax.axis_index(self.axis) * heads.shape[1] // lax.axis_size(self.axis)
        return lax.dynamic_slice_in_dim(heads, first, held, 1)
