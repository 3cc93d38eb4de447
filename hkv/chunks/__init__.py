"""LMCache 0.5.6's view of a hybrid cache: formats, kernel groups, object groups, chunk objects, plans and lookup.

All but `transfer` is host-only. Sizes in tokens, slots, blocks and bytes meet here; every name says which it means:
a *block id* is the engine's, a *slot* is one physical row of a page, a *chunk* is the tokens of one chunk object.
"""
