"""What models learn from: generated tasks with exact verifiers, and baselines to compare with."""
