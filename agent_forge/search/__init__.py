"""Searching among anything that can be scored: candidates, strategies, evolution. No torch.

A strategy reads no clock, no file and no global random state: what it asks for next follows from
its settings, its seed and what it was told.
"""
