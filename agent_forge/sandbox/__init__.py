"""Run code that nobody has read: in a process of its own, with limits. See docs/sandbox.md.

run        start a confined process, watch it, leave nothing of it behind
child      the program of that process: it confines itself, then runs the code
grade      run tests against an answer, in two confined processes
protocol   what those two say to each other
"""

from agent_forge.sandbox.grade import GradeResult, run_tests
from agent_forge.sandbox.run import LAYERS, ExecutionResult, SandboxLimits, layers, run

__all__ = [
    "LAYERS",
    "ExecutionResult",
    "GradeResult",
    "SandboxLimits",
    "layers",
    "run",
    "run_tests",
]
