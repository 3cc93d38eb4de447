"""Shapes of recurrent states: published numbers, and vLLM's own calculator where it is installed."""

from __future__ import annotations

import importlib
import itertools

import pytest

from hkv.errors import ConfigError
from hkv.model.huggingface.families.states import gated_delta_net, kimi_delta, lightning, mamba1, mamba2


def test_shapes_by_hand() -> None:
    assert mamba1(2, intermediate=8192, state=16, kernel=4) == ((3, 4096), (4096, 16))
    sizes = {"intermediate": 8192, "groups": 8, "heads": 128, "head_dim": 64, "state": 128, "kernel": 4}
    assert mamba2(1, **sizes) == ((3, 10240), (128, 64, 128))
    assert mamba2(16, **sizes) == ((3, (8192 + 2 * 16 * 128) // 16), (8, 64, 128))
    delta = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "kernel": 4}
    assert gated_delta_net(4, **delta, drafts=2) == ((5, 2048), (8, 128, 128))
    assert kimi_delta(1, heads=32, head_dim=128, kernel=4) == ((3, 12288), (32, 128, 128))
    assert lightning(2, heads=32, head_dim=128) == ((16, 128, 128),)


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads = 6"):
        lightning(4, heads=6, head_dim=16)


@pytest.mark.vllm
def test_shapes_equal_those_of_an_installed_vllm() -> None:
    utils = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
    theirs = utils.MambaStateShapeCalculator
    for ranks, kernel, drafts, heads in itertools.product((1, 2, 4, 8), (2, 4), (0, 3), (8, 32)):
        assert mamba1(ranks, intermediate=64 * heads, state=16, kernel=kernel) == theirs.mamba1_state_shape(
            ranks, 64 * heads, 16, kernel
        )
        for groups in (1, 2, 8):
            ours = mamba2(
                ranks,
                intermediate=64 * heads,
                groups=groups,
                heads=heads,
                head_dim=64,
                state=128,
                kernel=kernel,
                drafts=drafts,
            )
            wanted = theirs.mamba2_state_shape(ranks, 64 * heads, groups, heads, 64, 128, kernel, drafts)
            assert ours == wanted
        delta = {"key_heads": heads // 2, "value_heads": heads, "key_dim": 64, "value_dim": 128, "kernel": kernel}
        assert gated_delta_net(ranks, **delta, drafts=drafts) == theirs.gated_delta_net_state_shape(
            ranks, heads // 2, heads, 64, 128, kernel, drafts
        )
        assert kimi_delta(ranks, heads=heads, head_dim=64, kernel=kernel, drafts=drafts) == theirs.kda_state_shape(
            ranks, heads, 64, conv_kernel_size=kernel, num_spec=drafts
        )
        assert lightning(ranks, heads=heads, head_dim=64) == theirs.linear_attention_state_shape(heads, ranks, 64)
