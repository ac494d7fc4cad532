"""Durable state: files, the registry, sessions, model directories and checkpoints.

Modules here are imported by name (`from agent_forge.store import files`), so that what needs no
torch does not load it.
"""
