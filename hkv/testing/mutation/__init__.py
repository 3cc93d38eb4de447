"""Mutation testing: one-token edits of a module's source, and a command that has to notice each.

`edits` lists the edits of a source text; `trials` runs a judge with one of them in place, and keeps verdicts in a file;
`judge/sitecustomize.py` puts the edited text in the place of the module, in memory, in every Python process of a judge.
"""
