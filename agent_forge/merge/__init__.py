"""Merging weights: methods, the eight combos, recipes, preflight, and the engine that streams."""
