"""Judge an answer by tests that it cannot see, fake or stop: see protocol.py for how."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_forge.sandbox.run import Child, ExecutionResult, Limits, compiled, watch

PROTOCOL = Path(__file__).with_name("protocol.py")


@dataclass(frozen=True)
class GradeResult:
    """One verdict for each test, and how the process with the answer ended."""

    passed: tuple[bool, ...]
    outcome: ExecutionResult

    @property
    def ok(self) -> bool:
        return all(self.passed)


def check(
    code: str, tests: Sequence[str], *, setup: str = "", limits: Limits | None = None
) -> GradeResult:
    """Run each test (statements, mostly one assert) against what `code` defines.

    `setup` runs on both sides before the code and before the tests. A test passes if it raises
    nothing; one that was never reached has not passed.
    """
    limits = limits or Limits()
    to_answer, to_judge = os.pipe(), os.pipe()
    ends = [*to_answer, *to_judge]
    try:
        judging = f"judge({to_judge[0]}, {to_answer[1]}, {setup!r}, {list(tests)!r})"
        answering = f"answer({to_answer[0]}, {to_judge[1]}, {code!r}, {setup!r})"
        both = compiled(PROTOCOL)
        with (
            Child(both, judging, limits=limits, fds=(to_judge[0], to_answer[1])) as judge,
            Child(both, answering, limits=limits, fds=(to_answer[0], to_judge[1])) as answer,
        ):
            while ends:
                os.close(ends.pop())
            watch([judge, answer])
            said = judge.outcome().stdout
            passed = tuple(said[n : n + 1] == "1" for n in range(len(tests)))
            return GradeResult(passed, answer.outcome())
    finally:
        for fd in ends:
            os.close(fd)
