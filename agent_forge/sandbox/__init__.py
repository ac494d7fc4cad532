"""Run code that nobody has read: in a process of its own, with limits. See docs/sandbox.md.

run        start a confined process, watch it, leave nothing of it behind; grade an answer by tests
child      the program of that process: it confines itself, then runs the code
protocol   what the processes of an answer and of its tests say to each other
"""

from agent_forge.sandbox.run import SandboxLimits, layers, run, run_tests

__all__ = ["SandboxLimits", "layers", "run", "run_tests"]
