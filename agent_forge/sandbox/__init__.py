"""Run code that nobody has read: in a process of its own, with limits. See docs/sandbox.md."""

from agent_forge.sandbox.judge import Checked, check
from agent_forge.sandbox.run import LAYERS, Limits, Outcome, layers, run

__all__ = ["LAYERS", "Checked", "Limits", "Outcome", "check", "layers", "run"]
