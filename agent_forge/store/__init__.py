"""Durable state. Modules are imported by name, so that what needs no torch does not load it.

files.py       the only durable writer: files and folders with manifests, complete or absent
disk.py        the calls that change the disk, which tests make fail, and looks at it
paths.py       safe names, where things live below the storage root, what can be written to
lock.py        the lock of a run directory
records.py     session.json, metadata.json, handoffs, and the schema of the registry
registry.py    ModelRegistry: the SQLite index of sessions, models and handoffs
sessions.py    SessionStore: run directories; making the registry again from them
cleanup.py     SessionCleanupManager: which old sessions are removed
models.py      ModelStorage: model directories with their card
tensors.py     safetensors and foreign weights; tied weights; the scan for NaN
pytree.py      nested state as tensors plus JSON
checkpoint.py  CheckpointManager: the state of a training run
archive.py     a run or a model as one tar file
container.py   a model in one small file, and the folder that commands open it from
"""
