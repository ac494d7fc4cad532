"""Grade an answer by tests that it cannot see, fake or stop: see protocol.py for how."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_forge.sandbox.run import ExecutionResult, SandboxLimits, SandboxProcess, compiled, watch

PROTOCOL = Path(__file__).with_name("protocol.py")


@dataclass(frozen=True)
class GradeResult:
    """Which of the tests passed, and how the process with the answer ended."""

    passed: tuple[bool, ...]
    execution: ExecutionResult

    @property
    def ok(self) -> bool:
        """True if every test passed; without any test nothing is shown."""
        return bool(self.passed) and all(self.passed)


def run_tests(
    code: str, tests: Sequence[str], *, setup: str = "", limits: SandboxLimits | None = None
) -> GradeResult:
    """Run each test (statements, mostly one assert) against what `code` defines.

    `setup` runs on both sides before the code and before the tests. A test passes if it raises
    nothing; one that was never reached has not passed.
    """
    limits = limits or SandboxLimits()
    (answer_in, tests_out), (tests_in, answer_out) = os.pipe(), os.pipe()
    ends = [answer_in, tests_out, tests_in, answer_out]
    try:
        tester = f"test_answer({tests_in}, {tests_out}, {setup!r}, {list(tests)!r})"
        server = f"serve_answer({answer_in}, {answer_out}, {code!r}, {setup!r})"
        both = compiled(PROTOCOL)
        with (
            SandboxProcess(both, tester, limits=limits, fds=(tests_in, tests_out)) as testing,
            SandboxProcess(both, server, limits=limits, fds=(answer_in, answer_out)) as answering,
        ):
            while ends:
                os.close(ends.pop())
            watch([testing, answering])
            grades = testing.result().stdout
            passed = tuple(grades[n : n + 1] == "1" for n in range(len(tests)))
            return GradeResult(passed, answering.result())
    finally:
        for fd in ends:
            os.close(fd)
