"""What a run tells: metrics and events on disk as the truth; logs, progress and W&B as views.

tracker.py     Tracker: metrics.jsonl and events.jsonl, listeners, sinks; the sampler
journal.py     a file of JSON lines that can be taken back to an earlier record
logs.py        the package's log messages as JSON lines in log.jsonl
progress.py    displays: bars, plain lines, JSON lines; time left
wandb_sink.py  Weights & Biases as a mirror of the metrics
sync.py        a run replayed into one run of W&B or trackio
"""
