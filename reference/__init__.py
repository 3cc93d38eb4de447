"""HKV's reference: NumPy, dictionaries and plain loops; room for room the twin of `hkv`, and believed on sight."""

HKV_VERSION = "0.2.0"
"""HKV's version. PyPI has an unrelated package called `reference`; this tells them apart."""
