"""Settings: typed, frozen, torch-free.

`settings` holds the sections that all phases share, `load` turns presets, files and `--set` into
one checked object, `layout` is the folder that `forge init` writes.
"""
