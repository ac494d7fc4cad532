"""Run code that nobody has read: in a process of its own, with limits. See docs/sandbox.md."""

from agent_forge.sandbox.grade import GradeResult, check
from agent_forge.sandbox.run import LAYERS, ExecutionResult, Limits, layers, run

__all__ = ["LAYERS", "ExecutionResult", "GradeResult", "Limits", "check", "layers", "run"]
