"""The longest hit where hits may end inside blocks: every length of whole hash blocks is tried, by its definition.

Full attention can resume inside a block that it has under the key of as many hash blocks, or of more of them; a
recurrent group where it has the state of exactly that length. Other groups have blocks of one hash block.
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp

from hkv.cache.spans import count_up
from hkv.dialects.vllm.rules.parameters import CacheField, GroupField, Parameters
from hkv.state.loops import ceil_divide, divide, remainder


def longest(
    parameters: Parameters,
    groups: jax.Array,
    held: jax.Array,
    begin: jax.Array,
    proof: jax.Array,
    counts: jax.Array,
    width: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The longest hits of K prompts, of which every hash block was looked up in each of G groups.

    Args:
      parameters: the configuration.
      groups: int32[G, 32], of it.
      held: int32[K, G, C], the block under the key of each hash block; 0 for none.
      begin: int32[G, C + 1], the first entry that each group needs to resume after so many hash blocks.
      proof: int32[G, C + 1], hash blocks that it needs after them.
      counts: int32[K], tokens of each prompt.
      width: static; entries of a row, W.

    Returns:
      As in `hkv.cache.arrivals.Lookup`: hits int32[K], shared prefixes int32[K], hits alone int32[K, G] and blocks
      int32[K, G, W].
    """
    prompts, units = held.shape[0], held.shape[2]
    size = jnp.maximum(parameters.cache[CacheField.HASH_BLOCK], 1)
    scale = jnp.maximum(groups[:, GroupField.SCALE, None], 1)
    recurrent = groups[:, GroupField.RECURRENT, None] != 0
    cacheable = groups[:, GroupField.CACHEABLE, None] != 0
    reached = _reached(held, scale, width)
    readable = _readable(groups, held, reached, begin, proof) | ~cacheable[None]
    length = count_up(units + 1)
    aligned = remainder(length * size, jnp.maximum(parameters.cache[CacheField.ALIGNMENT], 1)) == 0
    below = ((length * size)[None] < counts[:, None]) & aligned[None]

    def most(good: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(good & below, length[None], 0), axis=1)

    hits = most(jnp.all(readable, axis=1))
    together = (groups[:, GroupField.COLUMN] < groups[0, GroupField.FINDER_COUNT])[None, :, None]
    first = most(jnp.all(readable | ~together, axis=1))
    alone = jnp.max(jnp.where(readable & below[:, None], length[None, None], 0), axis=2)

    column = count_up(width)[None, None]
    # The longest key of a block names it; shorter ones are of the same block, or of one that will be copied.
    filled = jnp.take_along_axis(held, jnp.maximum(reached[:, :, :width] - 1, 0), axis=2)
    at = jnp.broadcast_to(jnp.maximum(hits - 1, 0)[:, None, None], (prompts, held.shape[1], 1))
    state = jnp.take_along_axis(held, at, axis=2)
    last = ceil_divide(jnp.broadcast_to(hits[:, None, None], (prompts, *scale.shape)), scale[None])
    from_start = (column >= begin[:, hits].T[:, :, None]) | (column < groups[:, GroupField.SINKS, None][None])
    blocks = jnp.where(from_start & (column < last), filled, 0)
    blocks = jnp.where(recurrent[None], jnp.where(column == last - 1, state, 0), blocks)
    blocks = jnp.where(cacheable[None], blocks, 0)
    return hits * size, jnp.where(first > hits, first, 0) * size, alone * size, blocks


def _reached(held: jax.Array, scale: jax.Array, width: int) -> jax.Array:
    """Hash blocks up to which some block of each entry is cached, the longest one, int32[K, G, W + 1]; 0 for none."""
    prompts, groups, units = held.shape
    unit = jnp.broadcast_to(count_up(units)[None, None], held.shape)
    column = jnp.minimum(divide(unit, scale[None]), width)
    prompt = count_up(prompts)[:, None, None]
    group = count_up(groups)[None, :, None]
    empty = jnp.zeros_like(held, shape=(prompts, groups, width + 1))
    return empty.at[prompt, group, column].max(jnp.where(held > 0, unit + 1, 0))


def _readable(groups: jax.Array, held: jax.Array, reached: jax.Array, begin: jax.Array, proof: jax.Array) -> jax.Array:
    """True where a group can resume after so many hash blocks, bool[K, G, C + 1]."""
    width, units = reached.shape[2] - 1, held.shape[2]
    scale = jnp.maximum(groups[:, GroupField.SCALE, None], 1)
    whole = (count_up(width)[None] + 1) * scale
    missing = jnp.pad(reached[:, :, :width] != whole[None], ((0, 0), (0, 0), (1, 0)))
    missing = jnp.cumsum(missing, axis=2, dtype=jnp.int32)

    def missed(column: jax.Array) -> jax.Array:
        """Entries before some columns int32[G, C + 1] that are not there whole, those past the row's end too."""
        within = jnp.broadcast_to(jnp.minimum(column, width), (held.shape[0], *column.shape))
        return jnp.take_along_axis(missing, within, axis=2) + jnp.maximum(column - width, 0)[None]

    wanted = count_up(units + 1)[None] + proof
    end, rest = divide(wanted, scale), remainder(wanted, scale)
    place = jnp.broadcast_to(jnp.minimum(end, width), (held.shape[0], *end.shape))
    inside = (rest == 0)[None] | ((jnp.take_along_axis(reached, place, axis=2) >= wanted[None]) & (end < width)[None])
    sinks = jnp.minimum(divide(count_up(units + 1)[None], scale), groups[:, GroupField.SINKS, None])
    everything = (missed(end) == missed(begin)) & (missed(sinks) == 0) & inside
    state = jnp.pad(held > 0, ((0, 0), (0, 0), (1, 0)))
    readable = jnp.where((groups[:, GroupField.RECURRENT, None] != 0)[None], state, everything)
    return readable | (count_up(units + 1) == 0)[None, None]
