"""The compiled cache's engine for a header: the one that follows the rules of the header's dialect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkv.oracle.oplog import Header
from hkv.oracle.rtp_llm.structs import RtpHeader

if TYPE_CHECKING:
    from hkv.oracle.engines.jax import JaxEngine
    from hkv.oracle.engines.rtp_jax import RtpJaxEngine


def jax_engine(header: Header | RtpHeader) -> JaxEngine | RtpJaxEngine:
    """The compiled engine.

    Raises:
      UnsupportedConfigError: a configuration that only the reference implements.
      HKVError: a configuration the dialect forbids.
    """
    if isinstance(header, RtpHeader):
        from hkv.oracle.engines.rtp_jax import RtpJaxEngine

        return RtpJaxEngine(header)
    from hkv.oracle.engines.jax import JaxEngine

    return JaxEngine(header)
