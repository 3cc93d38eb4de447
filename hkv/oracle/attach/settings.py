"""Settings of an attachment, and their text in the environment variable that carries them into a server's processes."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from hkv.errors import ConfigError

VARIABLE = "HKV_ATTACH"
"""Environment variable that switches observation on: the folder of the logs, or settings as a JSON object."""

MODES = ("record", "shadow")
COMPRESSIONS = ("", "gz", "zst")
STATES = ("none", "end", "digest", "step", "all")
REACTIONS = ("report", "raise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttachSettings:
    """Form in which live engines are observed.

    Attributes:
      folder: folder of the logs; made if it is not there.
      mode: `record`, which writes a log of each cache; `shadow`, which performs its operations on another engine, too,
        and writes a log up to the first difference, if there is one.
      engine: name of the engine beside it, in mode `shadow`.
      on_difference: `report` it, on standard error, or `raise` in the observed engine's own call.
      share: probability with which a cache is observed, drawn as it is made, where all of a process are; one that is
        not costs nothing.
      states: the states that are written: `none`, `end` when it ends, `digest` every 64 calls as well, at every
        `step`, or after `all` operations, which also says what changed between two.
      compression: `gz`, `zst`, or none.
      part_bytes: bytes of a log, before compression, after which its next part begins; None for one part.
    """

    folder: str
    mode: str = "record"
    engine: str = "numpy"
    on_difference: str = "report"
    share: float = 1.0
    states: str = "end"
    compression: str = ""
    part_bytes: int | None = None

    def __post_init__(self) -> None:
        choices = {"mode": MODES, "compression": COMPRESSIONS, "states": STATES, "on_difference": REACTIONS}
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    name, getattr(self, name), f"one of {', '.join(value or '(none)' for value in values)}"
                )
        if not self.folder:
            raise ConfigError("folder", self.folder, "a folder for the logs")
        if type(self.share) not in (int, float) or not 0 < self.share <= 1:
            raise ConfigError("share", self.share, "a probability above 0, 1 at most")
        if self.part_bytes is not None and (type(self.part_bytes) is not int or self.part_bytes < 1):
            raise ConfigError("part_bytes", self.part_bytes, "a positive number of bytes")

    def variable(self) -> str:
        """Text of the settings for `VARIABLE`; the folder is made absolute."""
        fields = dataclasses.asdict(self) | {"folder": str(pathlib.Path(self.folder).absolute())}
        return msgspec.json.encode(fields).decode()


def settings_of(text: str) -> AttachSettings:
    """The settings that a text stands for: a folder, or a JSON object of `AttachSettings`.

    Raises:
      ConfigError: neither.
    """
    if not text.lstrip().startswith("{"):
        return AttachSettings(folder=text)
    try:
        fields: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
        return AttachSettings(**fields)
    except (msgspec.MsgspecError, TypeError) as error:
        raise ConfigError(VARIABLE, text, f"a folder, or settings as a JSON object ({error})") from None


def settings_from(environment: Mapping[str, str] = os.environ) -> AttachSettings | None:
    """The settings that an environment asks for; None where it asks for no observation."""
    text = environment.get(VARIABLE, "")
    return settings_of(text) if text else None
