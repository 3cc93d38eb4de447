"""vLLM's plugin of HKV (entry point group `vllm.general_plugins`): observes every cache if the environment says so.

vLLM loads it in every process it starts. Without `HKV_ATTACH` in the environment it does nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import sys

from hkv.dialects import registry
from hkv.dialects.vllm.attach.attach import Attached, is_attached
from hkv.dialects.vllm.config import NAME
from hkv.errors import ConfigError, HKVError
from hkv.oracle.attach.judged import judge_stores
from hkv.oracle.attach.session import Session
from hkv.oracle.attach.settings import settings_from


def register() -> None:
    """Observes the managers of this process, once, and says so, or why not, in one line on standard error."""
    try:
        settings = settings_from()
        if settings is None or is_attached():
            return
        check_version()
        session = Session(settings)
    except (HKVError, OSError) as error:
        _say(f"this process is not observed: {' '.join(str(error).split())}")
        return
    Attached(session)
    judge_stores(session)
    done = "recorded to" if settings.mode == "record" else f"held against engine {settings.engine}, differences go to"
    _say(f"vLLM's cache managers are {done} {pathlib.Path(settings.folder).absolute()} (process {os.getpid()})")


def check_version() -> None:
    """Makes sure that the installed vLLM is of the version whose rules are HKV's.

    Raises:
      ConfigError: it is another.
    """
    found, expected = importlib.metadata.version("vllm"), registry.dialect_of(NAME).engine_versions["vllm"]
    if not re.match(rf"{re.escape(expected)}(\.|$)", found):
        raise ConfigError("vllm", found, f"version {expected}, whose rules HKV has")


def _say(text: str) -> None:
    print(f"hkv: {text}", file=sys.stderr, flush=True)
