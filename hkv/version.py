"""HKV's version, which the package `reference` has to be of, too."""

from __future__ import annotations

from hkv.errors import HKVError

__version__ = "0.2.0"


def check_reference() -> None:
    """Make sure that the package called `reference` is HKV's, of this version; PyPI has an unrelated one.

    Raises:
      HKVError: it is not; names the file that shadows it.
    """
    import reference

    version = getattr(reference, "HKV_VERSION", None)
    if version != __version__:
        path = getattr(reference, "__file__", None) or list(getattr(reference, "__path__", []))
        expected = f"the one that belongs to HKV {__version__}; another package of that name comes first on sys.path"
        raise HKVError("package reference", path, expected)
