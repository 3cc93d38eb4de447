"""RTP-LLM's split of a GPU's memory, and the number of blocks that a budget buys."""

from __future__ import annotations

from hkv.errors import PlanError

MIB = 1 << 20


def blocks_for_budget(total: int, *, reserve: int = 0, paged: int, swa: int = 0, step: int = 1) -> int:
    """The largest N with `reserve + N * paged + ceil(N / step) * swa <= total`; 0 if none (RTP-LLM).

    Args:
      total: bytes.
      reserve: bytes of pools of a fixed size.
      paged: bytes of one more block of full and linear groups.
      swa: bytes of one more block of SWA groups.
      step: paged blocks for each SWA block.

    Raises:
      PlanError: a block costs nothing.
    """
    if paged + swa <= 0:
        raise PlanError("paged", paged, "bytes that a block costs")
    step = max(1, step)
    left = total - reserve
    if left < 0:
        return 0
    rounds, rest = divmod(left, step * paged + swa)
    inside = (rest - swa) // paged if paged and rest >= swa else 0
    return rounds * step + max(0, min(inside, step - 1))


def runtime_reserve(total: int, *, configured: int = 0, used_in_warm_up: int = 0, large: bool = False) -> int:
    """Bytes kept for running the model.

    Args:
      total: bytes of the device.
      configured: bytes that the operator asked for, raised to 2 GiB or a twentieth of the device, whichever is more.
      used_in_warm_up: bytes that the warm-up run used.
      large: a multimodal or speculative model, which keeps 2 GiB at least.
    """
    configured = max(configured, 2048 * MIB, total // 20)
    return max(configured, used_in_warm_up, 2048 * MIB if large else 0)


def cache_memory(
    available: int, *, total: int, configured: int = 0, vocab_size: int = 0, batch: int = 0, runtime: int | None = None
) -> int:
    """Bytes for the cache: what is configured, or what sampling and running leave.

    Args:
      available: free bytes, the fewer of now and at warm-up.
      total: bytes of the device.
      configured: bytes for the cache as configured, 0 to derive them.
      vocab_size: tokens of the vocabulary.
      batch: requests sampled at once.
      runtime: bytes for running, None for `runtime_reserve(total)`.
    """
    if configured > 0:
        return configured
    sampling = batch * vocab_size * 32
    return max(0, available - max(sampling, runtime_reserve(total) if runtime is None else runtime))
