"""A step's metadata as JAX's ragged-paged-attention kernels and the engines around them take it, and their pages.

An LBNHC page of keys and values is, byte for byte, the page of JAX's, tokamax's and tpu-inference's kernels,
`[tokens, 2 * heads, elements]` with each head's value behind its key; a page of latents is `[tokens, elements]`. So
`kernel_pages` is a view, and a kernel that writes new tokens itself writes where `hkv.serving.write` does. Read in JAX
0.10.2 (`ragged_paged_attention`), tokamax 0.0.17 (`batched_rpa`), tpu-inference 0.32 (`AttentionMetadata`) and
sglang-jax 0.0.2 (`FlashAttentionMetadata`).
"""

# jax.numpy types some of its own arguments as unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from hkv.cache.spans import count_up, running_sum
from hkv.errors import LayoutError
from hkv.layout.orders import B, C, H, L, N
from hkv.layout.views.numpy import numpy_dtype
from hkv.pytrees import pytree
from hkv.serving.serving import Serving, Turn, read_state, require_turn, write_state


@pytree()
@dataclasses.dataclass(frozen=True)
class Ragged:
    """Arguments of a ragged-paged-attention kernel for Q queries of one layer.

    Queries that were refused are sequences of nothing but their own tokens, on the null block's page.

    Attributes:
      kv_lens: int32[Q], tokens of each sequence, those of the query included.
      page_indices: int32[Q * W], pages of `kernel_pages`, W of each sequence one after the other.
      cu_q_lens: int32[Q + 1], where each query begins.
      num_seqs: int32[1], sequences; behind them are none.
      distribution: int32[3]: decodes end at the first number, prefills of one size at the second, the same, and all
        sequences at the third.
    """

    kv_lens: jax.Array
    page_indices: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array
    distribution: jax.Array


def kernel_pages(serving: Serving, layer: str) -> jax.Array:
    """All pages of the pool as a kernel reads those of a layer: a view of the pool's bytes.

    Returns:
      `[pages, tokens, 2 * heads, elements]`, or of latents `[pages, tokens, elements]`, of the layer's dtype.

    Raises:
      LayoutError: the layer's pages are others: heads outside tokens, keys of another size or dtype than values,
        anything but keys and values, or pages that are not a whole number of pages apart.
    """
    _page_size(serving, layer)
    layout = serving.layer(layer).layout
    part = layout.content[0]
    heads = () if len(layout.content) == 1 else (2 * layout.shape[H],)
    found = lax.bitcast_convert_type(serving.pool, numpy_dtype(part.dtype))
    return found.reshape(-1, layout.shape[N], *heads, *part.shape)


def ragged(serving: Serving, turn: Turn, layer: str) -> Ragged:
    """The step's metadata for a kernel over `kernel_pages(serving, layer)`.

    Raises:
      LayoutError: as `kernel_pages`.
    """
    require_turn(serving, turn, "metadata")
    size, at = _page_size(serving, layer), serving.layer(layer)
    layer_step, block_step = at.layout.strides[L] // size, at.layout.strides[B] // size
    first = at.layout.offset // size + at.index * layer_step
    asked = turn.cu_q_lens[1:] - turn.cu_q_lens[:-1]
    count = jnp.max(jnp.where(asked > 0, count_up(len(asked)) + 1, 0), keepdims=True)
    decodes = jnp.sum(lax.cumprod((asked == 1).astype(jnp.int32)), keepdims=True, dtype=jnp.int32)
    return Ragged(
        kv_lens=jnp.where(turn.served, turn.kv_lens, asked),
        page_indices=(first + turn.tables[:, at.group] * block_step).reshape(-1),
        cu_q_lens=turn.cu_q_lens,
        num_seqs=count,
        distribution=jnp.concatenate([decodes, decodes, count]),
    )


def tpu_inference(serving: Serving, turn: Turn, layer: str, state_layer: str | None = None) -> dict[str, jax.Array]:
    """Fields of tpu-inference's `AttentionMetadata` for the layers of one group; `AttentionMetadata(**fields)`.

    Args:
      serving: the cache.
      turn: of this step.
      layer: a layer of attention (static).
      state_layer: a recurrent layer, whose blocks are the slots of `mamba_state_indices` (static); None for none. The
        engine reads states where it writes them: `carry_states` before.

    Raises:
      LayoutError: as `kernel_pages`.
    """
    found = ragged(serving, turn, layer)
    fields = {
        "input_positions": jnp.maximum(turn.positions, 0),
        "block_tables": found.page_indices,
        "seq_lens": found.kv_lens,
        "query_start_loc": found.cu_q_lens,
        "request_distribution": found.distribution,
    }
    if state_layer is not None:
        group = serving.layer(state_layer, states=True).group
        fields["mamba_state_indices"] = jnp.maximum(turn.result.writes[:, group], 0)
    return fields


def sglang_jax(serving: Serving, turn: Turn, layer: str) -> dict[str, jax.Array]:
    """Fields of sglang-jax's `FlashAttentionMetadata`, whose pages lie one sequence's after the other's.

    Raises:
      LayoutError: as `kernel_pages`.
    """
    found, tokens = ragged(serving, turn, layer), serving.layer(layer).layout.shape[N]
    table = found.page_indices.reshape(len(found.kv_lens), -1)
    held = -(-found.kv_lens // tokens)
    ends = running_sum(held)
    column = count_up(table.shape[1])
    place = jnp.where(column < held[:, None], (ends - held)[:, None] + column, table.size)
    return {
        "num_seqs": found.num_seqs,
        "cu_q_lens": found.cu_q_lens,
        "cu_kv_lens": jnp.concatenate([jnp.zeros_like(ends[:1]), ends]) * tokens,
        "page_indices": jnp.zeros_like(found.page_indices).at[place].set(table, mode="drop"),
        "seq_lens": found.kv_lens,
        "distribution": found.distribution,
    }


def carry_states(serving: Serving, layer: str, turn: Turn) -> Serving:
    """A recurrent layer's state before each query in the block of the state after it; zeros for those that begin.

    Raises:
      OperationError: chunks leave states behind inside them, which those engines do not write.
    """
    return write_state(serving, layer, turn, read_state(serving, layer, turn))


def _page_size(serving: Serving, layer: str) -> int:
    """Bytes of a kernel's page of a layer, of which all pages of the pool are an array."""
    layout = serving.layer(layer).layout
    parts = [(part.name, part.shape, part.dtype) for part in layout.content]
    names = [name for name, *_ in parts]
    if names != ["latent"] and (names != ["key", "value"] or parts[0][1:] != parts[1][1:]):
        raise LayoutError(f"layers[{layer!r}]", ", ".join(map(str, parts)), "keys and values of one size, or latents")
    cell = layout.shape[H] * layout.shape[C]
    size = layout.shape[N] * cell
    together = layout.strides[N] == cell and (layout.shape[H] == 1 or layout.strides[H] == layout.shape[C])
    if not together or layout.split != 1:
        raise LayoutError(f"layers[{layer!r}]", layout.order, "an order of heads inside tokens, as LBNHC")
    steps = {
        "offset": layout.offset,
        "layer stride": layout.strides[L],
        "block stride": layout.strides[B],
        "pool": serving.pool.nbytes,
    }
    for name, step in steps.items():
        if step % size:
            raise LayoutError(f"{name} of layers[{layer!r}]", step, f"a multiple of the page's {size} bytes")
    return size
