"""Settings: typed, frozen, torch-free.

settings.py     the sections that all phases share
load.py         presets, YAML and JSON files, config folders and --set, as one checked object
strict_json.py  JSON without NaN and endless nesting
phases.py       the names and folders of the eight phases
presets/        one YAML file a preset
"""
