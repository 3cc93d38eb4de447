"""Layers, groups and pools: topology, policies, descriptions, draft modules, and models' `config.json`. Host-only."""
