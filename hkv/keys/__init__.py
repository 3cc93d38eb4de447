"""What a cached prefix is called: chained hashes of its tokens, one module an engine's scheme. Importing it is host-only."""
