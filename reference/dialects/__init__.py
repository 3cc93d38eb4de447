"""Policies in the reference's form, one folder a dialect."""
