"""The pipeline: its whole config, and what runs the phases in order."""
