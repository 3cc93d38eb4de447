"""SGLang's plugin of HKV (entry point group `sglang.srt.plugins`): observes every cache if the environment says so.

SGLang loads it in its processes. Without `HKV_ATTACH` in the environment it does nothing.
"""

from __future__ import annotations

from hkv.dialects.sglang.attach import attach_all
from hkv.dialects.sglang.engines import require_sglang
from hkv.errors import HKVError
from hkv.oracle.attach.attach import Session, say, settings_from


def register() -> None:
    """Observes the prefix caches of this process, and says so, or why not, in one line on standard error."""
    try:
        settings = settings_from()
        if settings is None:
            return
        require_sglang()
        session = Session(settings)
    except (HKVError, OSError) as error:
        say(f"this process is not observed: {' '.join(str(error).split())}")
        return
    attach_all(session)
    session.say("SGLang's prefix caches")
