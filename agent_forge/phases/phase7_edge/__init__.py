"""Phase 7, Edge: as small and fast as a device needs it, at an accuracy that is kept.

| file | what is in it |
|---|---|
| config.py | EdgeSettings, the table of targets; torch-free |
| pruning.py | which channels, heads and layers matter least, and a model without them |
| profiling.py | bytes, latency, tokens a second and memory, measured on this machine |
| search.py | cuts, each followed by distillation; kept or taken back |
| phase.py | EdgePhase: measure, cut down to the target, measure, hand over |

The program that runs the result elsewhere is in native/, `forge export --bundle` writes it.
"""
