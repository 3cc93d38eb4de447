"""Gathering runs of a pool: `[n, runs, rows of a run, row]` from `[rows, row]` and the first row of each run."""
