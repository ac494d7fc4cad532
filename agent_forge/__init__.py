"""Agent Forge: grow, merge, teach, shrink and ship small language models on your own machine."""

__version__ = "0.1.0"
