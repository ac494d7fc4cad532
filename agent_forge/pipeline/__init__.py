"""The orchestrator: plan, run, resume, hand over.

config.py        PipelineConfig: all settings of a run; torch-free
environment.py   device, threads, seeds and versions of a run; how it is asked to stop
orchestrator.py  PipelineOrchestrator: the phases of one session, in order
phase_run.py     one phase of a session: its record, its disk and memory, running it
run_view.py      RunView: a run as its files tell it, read further as they grow
evolution_view.py  EvolutionView: a folder of forge evo, looked at like a run
jobs.py          runs as processes of their own: start, resume, stop
"""
