"""Conformance vectors: inputs and what must come of them, as JSON, for tests in languages that HKV is not written in.

`hkv vectors OUT/` writes one file a family; `vectors.schema.json` beside this file describes them. They are made by the
reference and the host-only descriptions, the same ones on every machine.
"""

from hkv.oracle.vectors.document import FAMILIES, VERSION, documents, schema, write_vectors

__all__ = ["FAMILIES", "VERSION", "documents", "schema", "write_vectors"]
