"""Shapes of recurrent states on one tensor-parallel rank, as vLLM 0.33's `MambaStateShapeCalculator` gives them.

A convolution's state is `[kernel - 1 + draft tokens, channels]`, channels innermost; the recurrent state follows it.
"""

from __future__ import annotations

from hkv.errors import ConfigError

Shapes = tuple[tuple[int, ...], ...]


def mamba1(ranks: int, *, intermediate: int, state: int, kernel: int) -> Shapes:
    """Convolution and state of a Mamba layer.

    Args:
      ranks: tensor-parallel ranks.
      intermediate: channels.
      state: elements of a channel's state.
      kernel: width of the convolution.
    """
    channels = _share("intermediate size", intermediate, ranks)
    return (kernel - 1, channels), (channels, state)


def mamba2(
    ranks: int, *, intermediate: int, groups: int, heads: int, head_dim: int, state: int, kernel: int, drafts: int = 0
) -> Shapes:
    """Convolution and state of a Mamba-2 layer; groups that ranks do not divide are replicated to one a rank."""
    groups = groups if groups % ranks == 0 else ranks
    channels = _share("convolution channels", intermediate + 2 * groups * state, ranks)
    return (kernel - 1 + drafts, channels), (_share("state heads", heads, ranks), head_dim, state)


def gated_delta_net(
    ranks: int, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int, drafts: int = 0
) -> Shapes:
    """Convolution and state of a gated delta net."""
    channels = _share("convolution channels", 2 * key_dim * key_heads + value_dim * value_heads, ranks)
    return (kernel - 1 + drafts, channels), (_share("value heads", value_heads, ranks), value_dim, key_dim)


def kimi_delta(ranks: int, *, heads: int, head_dim: int, kernel: int, drafts: int = 0) -> Shapes:
    """Convolution and state of Kimi delta attention."""
    channels = _share("convolution channels", 3 * heads * head_dim, ranks)
    return (kernel - 1 + drafts, channels), (_share("heads", heads, ranks), head_dim, head_dim)


def short_conv(ranks: int, *, channels: int, kernel: int, drafts: int = 0) -> Shapes:
    """State of a short convolution: nothing recurrent follows it."""
    return ((kernel - 1 + drafts, _share("convolution channels", channels, ranks)),)


def lightning(ranks: int, *, heads: int, head_dim: int) -> Shapes:
    """State of lightning (linear) attention: no convolution."""
    return ((_share("heads", heads, ranks), head_dim, head_dim),)


def _share(name: str, size: int, ranks: int) -> int:
    if size % ranks:
        raise ConfigError(name, size, f"a multiple of {ranks} tensor-parallel ranks")
    return size // ranks
