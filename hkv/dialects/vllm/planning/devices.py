"""GPUs by name, as far as vLLM 0.33's defaults depend on one: its name, its memory and its compute capability."""

from __future__ import annotations

import dataclasses

from hkv.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Attributes:
      name: its name for `--device`.
      driver_name: part of the name that the driver reports, in lower case; vLLM looks for `a100` in it.
      memory_gib: memory that it is sold with, in whole GiB or GB. Good enough to tell apart the classes of GPUs that
        vLLM has defaults for, 70 GiB and 160 GiB being the limits; cards and drivers differ in what they report, so
        that no plan computes with it.
      capability: compute capability, major and minor.
      reported: GiB that such a card reports as its whole memory (`torch.cuda.mem_get_info`), as PyTorch names it where
        memory runs out: the least that was found in public reports, or None where none was. Cards and drivers differ
        by a few tenths of a GiB.
      source: one such report.
    """

    name: str
    driver_name: str
    memory_gib: int
    capability: tuple[int, int]
    reported: float | None = None
    source: str = ""


DEVICES = {
    device.name: device
    for device in (
        Device("h100", "nvidia h100 80gb hbm3", 80, (9, 0), 79.11, "https://github.com/vllm-project/vllm/issues/27508"),
        Device("h200", "nvidia h200", 141, (9, 0), 139.72),
        Device("h20", "nvidia h20", 96, (9, 0)),
        Device("h800", "nvidia h800", 80, (9, 0)),
        Device("gh200", "nvidia gh200 480gb", 96, (9, 0)),
        Device("b200", "nvidia b200", 180, (10, 0), 178.35),
        Device("gb200", "nvidia gb200", 186, (10, 0)),
        Device("b300", "nvidia b300", 288, (10, 3)),
        Device("gb300", "nvidia gb300", 288, (10, 3)),
        Device("gb10", "nvidia gb10", 128, (12, 1)),
        Device(
            "a100", "nvidia a100-sxm4-80gb", 80, (8, 0), 79.25, "https://github.com/levihsu/OOTDiffusion/issues/235"
        ),
        Device("a100-40gb", "nvidia a100-sxm4-40gb", 40, (8, 0), 39.50, "https://github.com/TianheWu/CoSeR/issues/10"),
        Device("a800", "nvidia a800-sxm4-80gb", 80, (8, 0)),
        Device("a40", "nvidia a40", 48, (8, 6), 44.35),
        Device("a10", "nvidia a10", 24, (8, 6), 21.96, "https://github.com/rhymes-ai/Aria/issues/24"),
        Device("a6000", "nvidia rtx a6000", 48, (8, 6)),
        Device("l40s", "nvidia l40s", 48, (8, 9), 44.39),
        Device("l40", "nvidia l40", 48, (8, 9), 44.40, "https://github.com/QwenLM/Qwen3-VL/issues/2097"),
        Device("l4", "nvidia l4", 24, (8, 9), 21.96, "https://github.com/rhymes-ai/Aria/issues/24"),
        Device("rtx3090", "nvidia geforce rtx 3090", 24, (8, 6)),
        Device(
            "rtx4090",
            "nvidia geforce rtx 4090",
            24,
            (8, 9),
            23.52,
            "https://github.com/Soul-AILab/SoulX-FlashTalk/issues/5",
        ),
        Device(
            "rtx5090", "nvidia geforce rtx 5090", 32, (12, 0), 31.37, "https://github.com/Wan-Video/Wan2.1/issues/465"
        ),
        Device(
            "rtx-pro-6000",
            "nvidia rtx pro 6000 blackwell server edition",
            96,
            (12, 0),
            94.97,
            "https://github.com/antirez/ds4/issues/431",
        ),
    )
}
"""Devices by name, with NVIDIA's data sheets' memory, and the compute capabilities of its CUDA GPUs page."""

DEFAULT_DEVICE = "h100"
"""Device that is assumed where none is named."""


def device_of(name: str) -> Device:
    """The device of that name, in any case.

    Raises:
      ConfigError: none is called so.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError("device", name, f"one of {', '.join(sorted(DEVICES))}")
    return found


def reported_memory(name: str) -> int | None:
    """Bytes that such devices report as their memory; None where no report of it is known.

    Raises:
      ConfigError: none is called so.
    """
    reported = device_of(name).reported
    return None if reported is None else int(reported * 1024) << 20
