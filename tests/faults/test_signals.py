"""P14 on the command line: real signals to real processes, in every command and at any moment."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_forge.cli import generate, main, runs
from agent_forge.data import datasets
from agent_forge.evals import model_under_test
from agent_forge.infer import chat
from agent_forge.merge.engine import MergedWeights
from agent_forge.phases.phase2_evomerge import evolution, inputs, report
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.evaluator import CandidateEvaluator
from agent_forge.pipeline import orchestrator
from agent_forge.pipeline.environment import StopSignals
from agent_forge.store import files, lock
from tests.support.command_line import PATIENCE_S, Forge, Process, start, waiting
from tests.support.evo_models import evo_line, evolved, family, journal, outcome
from tests.support.merge_models import make_models
from tests.support.toy_runs import exit_code

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
KINDS = ("SIGINT", "SIGTERM", "SIGHUP")


def measured(folder: Path) -> int:
    return len(journal(folder / "x"))


def paused(process: Process) -> str:
    """What it said; it has ended as an evolution that can go on."""
    ended = process.ended()
    assert ended.code == 130 and ended.err.endswith("next: forge evo --resume x\n"), ended
    assert not lock.is_busy(process.folder / "x")
    return ended.err


def goes_on(folder: Path) -> None:
    """To the bytes of an evolution that nobody interrupted."""
    assert start(folder, ["evo", "--resume", "x"]).ended().code == 0
    assert outcome(folder / "x") == outcome(evolved())


@pytest.mark.parametrize("kind", KINDS)
def test_an_evolution_finishes_its_candidate_and_can_go_on(tmp_path: Path, kind: str) -> None:
    process = start(tmp_path, evo_line(), waiting(CandidateEvaluator, "measure", at=6))
    process.meet()
    process.send(kind)
    process.go_on()
    paused(process)
    assert measured(tmp_path) == 6  # the one under way is in
    if kind == KINDS[0]:
        goes_on(tmp_path)


def test_a_second_signal_leaves_an_evolution_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, evo_line(), waiting(CandidateEvaluator, "measure", at=6))
    process.meet()
    process.send("SIGTERM")
    time.sleep(0.5)
    assert lock.is_busy(tmp_path / "x")
    process.send("SIGHUP")
    told = paused(process)
    assert "finishing the present candidate, about" in told and "again to leave at once" in told
    assert "left at once" in told and measured(tmp_path) == 5
    goes_on(tmp_path)


def test_a_verdict_can_be_interrupted(tmp_path: Path) -> None:
    process = start(tmp_path, evo_line(), waiting(report, "_baselines"))
    process.meet()
    process.send("SIGTERM")
    process.go_on()
    assert "stopped during the verdict" in paused(process)
    assert not (tmp_path / "x" / "champion").exists()
    goes_on(tmp_path)


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["loading", "dry run"])
def test_an_evolution_that_has_not_begun_cannot_be_resumed(tmp_path: Path, more: list[str]) -> None:
    early = waiting(inputs, "open_inputs") if more else waiting(evolution, "EvolutionLoop")
    process = start(tmp_path, evo_line(*more), early)
    process.meet()
    process.send("SIGHUP")
    ended = process.ended()
    assert ended.code == 1 and ended.err.endswith("interrupted: nothing was begun\n")
    assert not list(tmp_path.glob("x/*.json*"))


def test_an_evolution_that_goes_on_can_be_resumed_from_the_first_moment(tmp_path: Path) -> None:
    shutil.copytree(evolved(), tmp_path / "x")
    process = start(tmp_path, ["evo", "--resume", "x"], waiting(evolution, "EvolutionLoop"))
    process.meet()
    process.send("SIGTERM")
    paused(process)


def test_forge_stop_asks_an_evolution(tmp_path: Path, forge: Forge) -> None:
    process = start(tmp_path, evo_line(), waiting(CandidateEvaluator, "measure", at=2))
    process.meet()
    assert "will stop" in forge("stop x").err
    process.go_on()
    paused(process)
    assert measured(tmp_path) == 2


def test_training_first_says_which_session_goes_on(tmp_path: Path) -> None:
    begun = waiting(orchestrator.PipelineOrchestrator, "_run_all")
    process = start(tmp_path, ["evo"], begun)
    process.meet()
    process.send("SIGTERM")
    process.go_on()
    ended = process.ended()
    session = next((tmp_path / "storage" / "sessions").glob("session_*"))
    assert ended.code == 130 and f"next: forge resume {session.name}, then forge evo" in ended.err
    assert files.read_checked(session / "session.json")["status"] == "paused"
    assert not (tmp_path / "evomerge").exists()


def test_an_interrupt_is_not_for_the_fitness_command(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group of the terminal: no candidate may fail of it."""
    (tmp_path / "score.sh").write_text(
        "touch .there; until [ -e .there-no-more ]; do sleep 0.02; done; wc -c < $1/config.json\n"
    )
    line = [item for item in evo_line() if not item.endswith(".jsonl") and item != "--data"]
    process = start(tmp_path, [*line, "--set", "fitness=sh score.sh"], os.setpgrp)
    process.meet()
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.1)
    process.go_on()
    paused(process)
    assert [record["problem"] for record in journal(tmp_path / "x")] == [""]


@contextlib.contextmanager
def nothing_changes(folder: Path) -> Iterator[None]:
    """What is in the folder before and after, but for the notes of the test itself."""

    def found() -> dict[str, str]:
        every = [path for path in folder.rglob("*") if path.name not in notes]
        return {str(p): files.sha256_of(p) if p.is_file() else "" for p in every}

    notes = {".out", ".err"} | {f".{m}{end}" for m in ("there", "late") for end in ("", "-no-more")}
    before = found()
    yield
    assert found() == before


@pytest.mark.parametrize(
    ("kind", "more"), [("SIGINT", []), ("SIGTERM", ["--combo", "all"]), ("SIGHUP", [])]
)
def test_an_interrupted_merge_leaves_nothing(tmp_path: Path, kind: str, more: list[str]) -> None:
    """Not even if the next signal comes while it is cleaning up: a closed terminal sends two."""
    make_models(tmp_path / "m")
    line = ["merge", "--models", "m/a,m/b,m/c", "y/out", "--threads", "1", *more]

    def patch() -> None:
        waiting(MergedWeights, "combos" if more else "compute", at=5)()
        waiting(files.FileSystemCalls, "remove_tree", mark="late")()

    with nothing_changes(tmp_path):
        process = start(tmp_path, line, patch)
        process.meet()
        process.send(kind)
        process.meet("late")
        process.send(kind)
        process.go_on("late")
        assert process.ended() == (1, "interrupted: nothing was written to y/out\n")


@pytest.mark.parametrize("more", [[], ["--combo", "all"]], ids=["one", "eight"])
def test_a_merge_whose_weights_are_all_there_is_finished(tmp_path: Path, more: list[str]) -> None:
    make_models(tmp_path / "m")
    line = ["merge", "--models", "m/a,m/b,m/c", "out", *more]
    process = start(tmp_path, line, waiting(files, "publish", at=8 if more else 1))
    process.meet()
    process.send("SIGINT")
    process.send("SIGTERM")
    process.go_on()
    assert process.ended().code == 0
    folders = list((tmp_path / "out").iterdir()) if more else [tmp_path / "out"]
    assert len(folders) == (8 if more else 1) and all(map(files.verify, folders))


def test_an_interrupted_replay_leaves_nothing(tmp_path: Path) -> None:
    line = ["evo", "replay", str(evolved() / "champion" / "lineage.json"), "y/out"]

    def patch() -> None:
        real = CandidateWeights.weights
        weights = lambda self, key: (self._write(key), real(self, key))[1]  # noqa: E731
        CandidateWeights.weights = weights  # type: ignore[method-assign]
        waiting(evolution, "write")()

    with nothing_changes(tmp_path):
        process = start(tmp_path, line, patch)
        process.meet()
        process.send("SIGTERM")
        assert process.ended() == (1, "interrupted: nothing was written to y/out\n")


TOY = "run --preset toy --session r --set phases.toy.steps=50000 --set storage.reserve_disk_mb=0"
RUN = Path("storage/sessions/r")
CHECKPOINTS = RUN / "toy/checkpoints/main"


def test_a_run_that_has_not_begun_cannot_be_resumed(tmp_path: Path) -> None:
    process = start(tmp_path, TOY.split(), waiting(orchestrator, "prepare"))
    process.meet()
    process.send("SIGTERM")
    assert process.ended() == (1, "interrupted: nothing was begun\n")
    assert not (tmp_path / "storage").exists()


def test_under_nohup_a_hangup_is_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, TOY.split(), lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.wait_for(tmp_path / CHECKPOINTS)
    for _ in range(2):
        process.send("SIGHUP")
        time.sleep(0.1)
    assert lock.is_busy(tmp_path / RUN)
    process.send("SIGTERM")
    ended = process.ended()
    assert ended.code == 130 and "next: forge resume r\n" in ended.err


def test_a_terminal_that_closes_pauses_a_run(tmp_path: Path) -> None:
    """The hangup comes with a signal, and whatever is written from then on is an error."""
    import pty

    pid, terminal = pty.fork()
    if not pid:
        code: Any = 70
        try:
            os.chdir(tmp_path)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            sys.argv = ["forge", *TOY.split()]
            main()
        except SystemExit as ended:
            code = ended.code
        finally:
            os._exit(int(code))
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / CHECKPOINTS).exists() and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.01)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)
    assert exit_code(pid) == 130
    assert files.read_checked(tmp_path / RUN / "session.json")["status"] == "paused"


def test_a_system_without_hangups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGHUP")
    stopper, before = StopSignals(), signal.getsignal(signal.SIGTERM)
    with stopper.on_signals():
        assert not stopper()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("line", "place", "name", "kind"),
    [
        ("eval base --data add.jsonl", model_under_test, "open_model_under_test", "SIGINT"),
        ("eval base --data add.jsonl", model_under_test, "open_model_under_test", "SIGTERM"),
        ("eval base --data add.jsonl", model_under_test, "open_model_under_test", "SIGHUP"),
        ("compare base add --data add.jsonl", model_under_test, "open_model_under_test", "SIGINT"),
        ("generate base hello", chat, "open_chat_model", "SIGHUP"),
        ("chat base", chat, "open_chat_model", "SIGINT"),
        ("data ls", datasets, "local_files", "SIGINT"),
        ("ls", runs, "_open", "SIGTERM"),
    ],
)
def test_any_other_command_ends_with_a_line(
    tmp_path: Path, line: str, place: Any, name: str, kind: str
) -> None:
    for path in family().iterdir():
        (tmp_path / path.name).symlink_to(path)
    process = start(tmp_path, line.split(), waiting(place, name))
    process.meet()
    process.send(kind)
    assert process.ended() == (1, "interrupted\n")


@pytest.mark.parametrize(("kind", "code"), [("SIGINT", 0), ("SIGTERM", 1), ("SIGHUP", 1)])
def test_ctrl_c_at_the_prompt_ends_a_chat(tmp_path: Path, kind: str, code: int) -> None:
    reader, writer = os.pipe()

    def patch() -> None:
        chat.open_chat_model = lambda *given: None  # type: ignore[assignment,return-value]
        waiting(generate, "_line")()

    process = start(tmp_path, ["chat", "."], patch, stdin=reader)
    process.meet()
    process.go_on()
    time.sleep(0.1)  # it reads what nobody types
    process.send(kind)
    assert process.ended() == (code, "interrupted\n" if code else "")
    os.close(reader)
    os.close(writer)
