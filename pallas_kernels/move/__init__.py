"""Moving runs of words from arrays into others, each word read once and written once, in one launch."""

from pallas_kernels.move.moves import Move

__all__ = ["Move"]
