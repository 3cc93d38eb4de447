"""DeepSeek-V3: latent attention (MLA), and experts chosen within groups."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from examples.serve.cached import Cached
from examples.serve.checkpoint import Weights
from examples.serve.families.decoder import decoder, embed
from examples.serve.families.experts import best, mixture, shares
from examples.serve.layers import EXACT, Rotary, gated_mlp, halves, linear, rms_norm, rotary, yarn_scale


def forward(config: dict[str, Any], weights: Weights, tokens: jax.Array, positions: jax.Array, cached: Cached) -> Any:
    """Logits of every token, as `examples.serve.families.llama.forward` gives them."""
    turn = rotary(config["rope_parameters"], config["qk_rope_head_dim"], positions)

    def mixer(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        return _latent_attention(config, own.below("self_attn."), x, cached, layer, turn)

    def feed_forward(layer: int, own: Weights, x: jax.Array) -> jax.Array:
        own = own.below("mlp.")
        if layer < config["first_k_dense_replace"]:
            return gated_mlp(own, x)
        return mixture(own.below("experts."), x, _shares(config, own, x)) + gated_mlp(own.below("shared_experts."), x)

    norm = functools.partial(rms_norm, epsilon=config["rms_norm_eps"])
    return decoder(config, weights, embed(weights, tokens), mixer, feed_forward, norm)


def _latent_attention(
    config: dict[str, Any], weights: Weights, x: jax.Array, cached: Cached, layer: int, turn: Rotary
) -> jax.Array:
    """Attention to latents: keys' and values' maps are moved to the queries and to the output."""
    plain, rank, epsilon = config["qk_nope_head_dim"], config["kv_lora_rank"], config["rms_norm_eps"]
    low = rms_norm(linear(x, weights, "q_a_proj"), weights["q_a_layernorm.weight"], epsilon)
    query = linear(low, weights, "q_b_proj").reshape(len(x), config["num_attention_heads"], -1)
    compressed = linear(x, weights, "kv_a_proj_with_mqa")[:, None]
    latent = rms_norm(compressed[..., :rank], weights["kv_a_layernorm.weight"], epsilon)
    maps = weights["kv_b_proj.weight"].reshape(query.shape[1], -1, rank)
    absorbed = jnp.einsum("thd,hdr->thr", query[..., :plain], maps[:, :plain], precision=EXACT)
    query = jnp.concatenate([absorbed, turn(halves(query[..., plain:]))], axis=-1)
    parts = {"latent": jnp.concatenate([latent, turn(halves(compressed[..., rank:]))], axis=-1)}
    factor = yarn_scale(config["rope_parameters"], "mscale_all_dim", 0)
    scale = (plain + config["qk_rope_head_dim"]) ** -0.5 * factor**2
    found = cached.attend(layer, query, parts, scale=scale, value_size=rank)
    found = jnp.einsum("thr,hvr->thv", found, maps[:, plain:], precision=EXACT)
    return linear(found.reshape(len(x), -1), weights, "o_proj")


def _shares(config: dict[str, Any], weights: Weights, x: jax.Array) -> jax.Array:
    """The best experts of the best groups, a group being as good as its two best; biases count in the choice alone."""
    scores = jax.nn.sigmoid(linear(x, weights, "gate"))
    biased = (scores + weights["gate.e_score_correction_bias"]).reshape(len(x), config["n_group"], -1)
    _, groups = best(best(biased, 2)[0].sum(axis=-1), config["topk_group"])
    inside = shares(groups, jnp.ones(groups.shape), config["n_group"])[..., None] > 0
    _, chosen = best(jnp.where(inside, biased, -jnp.inf).reshape(scores.shape), config["num_experts_per_tok"])
    found = jnp.take_along_axis(scores, chosen, axis=1)
    if config["norm_topk_prob"]:
        found = found / found.sum(axis=1, keepdims=True)
    return shares(chosen, found * config["routed_scaling_factor"], config["n_routed_experts"])
