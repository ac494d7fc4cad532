"""What a phase is: its controller, its context, its result, and the rules of handing over.

handoff.py  ModelHandoffValidator: what must hold of models between two phases
metrics.py  the names that a run may log, from the table in metrics.json
phase.py    PhaseController, PhaseContext, ModelRef, PhaseReport and PhaseResult
replay.py   decisions and measurements that a resumed phase replays
"""
