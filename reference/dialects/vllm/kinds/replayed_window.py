"""Latent window under bounded replay: it retires as windows do; a hit brings none of it, nor needs any."""

from reference.dialects.vllm.kinds.sliding_window import SlidingWindowKind


class ReplayedWindowKind(SlidingWindowKind):
    """vLLM 0.33 manages `SlidingWindowMLASpec` with `bounded_replay` by its `SlidingWindowManager`, never cached."""
