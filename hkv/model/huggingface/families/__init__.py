"""Families of models whose configs say more than layer types and a window, one a file.

A module here lists the `model_type`s it reads in `MODEL_TYPES` and reads one in `read(decoder)`.
"""
