"""The address map of LMCache 0.5.6's block transfers, and both directions of a transfer derived from it."""
