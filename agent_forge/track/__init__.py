"""What a run tells: metrics and events on disk as the truth; logs, progress and W&B as views."""
