"""P5: whatever a model, adapter, recipe or data file holds, a command ends well or says why.

Every case of hostile_models is given to commands of `forge`. It ends with a right result (exit code
0) or a named error (2, 4 or 5) as the case says; no code of it runs, nothing is asked on stdin,
nothing goes to the network, no input is changed, it neither works nor waits for 10 s nor takes
gigabytes, and a result is that of the weights in the files.

A command runs in a fork of this process, where torch and transformers are loaded already: so it
takes a tenth of a second, and what cannot be interrupted can be killed. `make test` gives what asks
for code to be run to every command, and everything else to one that a hash of its name chooses;
`make soak` gives every case to every command.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import pickle
import re
import runpy
import shlex
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import scipy.stats  # noqa: F401 - once here, not in every fork
import typer

from agent_forge import cli
from agent_forge.store import files
from tests.faults.hostile_goods import (
    BAD,
    LIKE,
    RIGHT,
    WEIGHTS,
    Case,
    canary_of,
    copied,
    goods,
    pickled,
    singing,
)
from tests.faults.hostile_models import CASES

SECONDS = 10.0
MEMORY_BYTES = 2_000_000_000  # on top of what the fork begins with
SMALL_BYTES = 4_000_000  # a larger input is compared by its size and time
TALKED = "hi\n\n"
ANSWERS = "y\n" * 20  # to questions that nobody may ask
DEFECTS = re.compile(r"Traceback \(most recent|this is a defect|^unexpected ", re.MULTILINE)
QUESTION = re.compile(r"\[y/N\]|trust_remote_code=True|Do you wish to run")
FEW = "--gens 0 --set fitness_subset_size=4 --set verdict_items=4 --set workers=1"
FEW += " --set use_holdout_validation=false --set max_evaluations=3"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


# -- running --------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a command line ended."""

    code: int  # below 0: killed by this signal
    out: str
    err: str
    problem: str = ""  # what nobody may do, if it was done


def run(arguments: list[str], place: Path, *, stdin: str = ANSWERS) -> Ended:
    """Run `forge ARGUMENTS` in a fork, within the folder `place`."""
    place.mkdir()
    (place / ".in").write_text(stdin)
    asked = os.open(place / ".in", os.O_RDONLY)
    parser()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _become_forge(arguments, place, asked)
    code, problem = _wait(pid)
    if stdin == ANSWERS and os.lseek(asked, 0, os.SEEK_CUR):
        problem = problem or "it asked a question"
    os.close(asked)
    out, err = ((place / name).read_text(errors="replace") for name in (".out", ".err"))
    if QUESTION.search(out + err):
        problem = problem or "it asked for trust"
    if (place / ".network").exists():
        problem = problem or f"it went to the network: {(place / '.network').read_text()}"
    return Ended(code, out, err, problem)


def _become_forge(arguments: list[str], place: Path, stdin: int) -> None:
    """The fork: the command line with streams of its own. It never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir(place)
        os.dup2(stdin, 0)
        for number, name in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "wr"[n == 0]) for n in range(3))
        socket.socket.connect = socket.getaddrinfo = _refuse_network  # type: ignore[assignment]
        cli.app = parser()
        sys.argv = ["forge", *arguments]
        cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - a panic of Rust is no Exception
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


@cache
def parser() -> Any:
    """The parser of the command line, which takes longer to make than most commands to refuse."""
    return typer.main.get_command(cli.app)


def _refuse_network(*arguments: object, **named: object) -> None:
    Path(".network").write_text(repr(arguments))
    raise OSError("there is no network here")


def _wait(pid: int) -> tuple[int, str]:
    """The exit code of a fork; one that takes too long or too much is killed with all its own."""
    moved, used, start, problem = time.monotonic(), 0.0, _taken(pid)[1], ""
    while True:
        found, status, _ = os.wait4(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), problem
        seconds, memory = _taken(pid)
        if seconds > used:
            moved, used = time.monotonic(), seconds
        if max(used, time.monotonic() - moved) > SECONDS:  # of work, or of waiting
            problem = f"it takes more than {SECONDS:.0f} s"
        elif memory - start > MEMORY_BYTES:
            problem = f"it takes more than {MEMORY_BYTES:,} bytes"
        if problem:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)


def _taken(pid: int) -> tuple[float, int]:
    """The processor time and the memory of a process; nothing of one that has just ended."""
    try:
        process = psutil.Process(pid)
        return sum(process.cpu_times()[:2]), process.memory_info().rss
    except psutil.Error:
        return 0.0, 0


# -- commands -------------------------------------------------------------------------------------

Line = Callable[[str, Path, str], list[str]]  # the case, a good model, data -> arguments


def _evo(parents: str, data: str, *more: str) -> list[str]:
    given = ["evo", "--base-models", parents, "--data", data, "--output-dir", "out"]
    return [*given, *FEW.split(), *more]


def _merge(models: str, *more: str) -> list[str]:
    return ["merge", "--models", models, "out", "--json", *more]


FIVE = ("--items", "5", "--json")
OF_MODELS: dict[str, Line] = {
    "eval": lambda bad, good, data: ["eval", bad, "--data", data, *FIVE],
    "compare": lambda bad, good, data: ["compare", str(good), bad, "--data", data, *FIVE],
    "compare-first": lambda bad, good, data: ["compare", bad, str(good), "--data", data, *FIVE],
    "generate": lambda bad, good, data: ["generate", bad, "12+1", "--max-tokens", "3", "--json"],
    "chat": lambda bad, good, data: ["chat", bad, "--max-tokens", "3"],
    "evo": lambda bad, good, data: _evo(f"{good},{bad}", data),
    "evo-first": lambda bad, good, data: _evo(f"{bad},{good}", data),
    "evo-dry": lambda bad, good, data: _evo(f"{good},{bad}", data, "--dry-run"),
    "merge": lambda bad, good, data: _merge(f"{good},{bad}"),
    "merge-first": lambda bad, good, data: _merge(f"{bad},{good}"),
    "merge-base": lambda bad, good, data: _merge(str(good), "--method", "ties", "--base", bad),
    "merge-dry": lambda bad, good, data: _merge(f"{good},{bad}", "--dry-run"),
    "quantize": lambda bad, good, data: ["quantize", bad, "out", "--json"],
    "compress": lambda bad, good, data: [
        *("compress", bad, "out.forge", "--ratio", "5", "--data", data, "--json"),
    ],
    "bake": lambda bad, good, data: [
        "bake",
        bad,
        "out",
        "--prompt",
        data,
        "--steps",
        "1",
        "--json",
    ],
}
COMMANDS: dict[str, dict[str, Line]] = {
    "model": OF_MODELS,
    "adapter": OF_MODELS,
    "recipe": {
        "merge": lambda bad, good, data: ["merge", bad, "out", "--json"],
        "merge-dry": lambda bad, good, data: ["merge", bad, "out", "--dry-run"],
    },
    "data": {
        "show": lambda bad, good, data: ["data", "show", bad],
        "eval": lambda bad, good, data: OF_MODELS["eval"](str(good), good, bad),
        "compare": lambda bad, good, data: OF_MODELS["compare"](_other(good), good, bad),
        "evo": lambda bad, good, data: OF_MODELS["evo"](_other(good), good, bad),
        "evo-dry": lambda bad, good, data: OF_MODELS["evo-dry"](_other(good), good, bad),
    },
    "lineage": {"replay": lambda bad, good, data: ["evo", "replay", bad, "out", "--json"]},
    "line": {"line": lambda bad, good, data: shlex.split(bad)},
}


def _other(good: Path) -> str:
    return str(good.parent / "a")


def sampled(case: Case) -> list[str]:
    """The commands of a case in `make test`: all for code that asks to be run, else one."""
    every = COMMANDS[case.kind]
    if re.search(r"\bcode\b", case.name):
        return list(every)
    return [min(every, key=lambda n: hashlib.sha256(f"{case.name} {n}".encode()).digest())]


# -- what may come of it --------------------------------------------------------------------------


def snapshot(root: Path, content: int) -> dict[str, tuple[Any, ...]]:
    """Everything below a folder, with the hash of files of at most `content` bytes."""
    return {str(path.relative_to(root)): _state(path, content) for path in sorted(root.rglob("*"))}


def _state(path: Path, content: int) -> tuple[Any, ...]:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "link", str(path.readlink())
    if not stat.S_ISREG(found.st_mode):
        return "other", found.st_mode
    digest = files.sha256_of(path) if found.st_size <= content else ""
    return "file", found.st_mode, found.st_size, found.st_mtime_ns, digest


class Trial:
    """A case in a folder of its own, ready to be given to commands."""

    def __init__(self, case: Case, root: Path) -> None:
        self.case, self.root, self.folder = case, root, root / "input"
        self.folder.mkdir()
        self.family = goods() / case.family
        self.ref = case.make(self.folder, self.family / "a")
        self.before = self.inputs()
        self.data = str(goods() / ("talks.jsonl" if case.talks else "rows.jsonl"))

    def inputs(self) -> tuple[Any, ...]:
        """All that no command may change; of the good models only sizes and times are compared."""
        return snapshot(self.folder, SMALL_BYTES), snapshot(goods(), 0)

    def run(self, command: str) -> Ended:
        arguments = COMMANDS[self.case.kind][command](self.ref, self.family / "b", self.data)
        stdin = TALKED if command == "chat" else ANSWERS
        return run(arguments, self.root / command, stdin=stdin)

    def problems(self, command: str) -> Iterator[str]:
        """All that is wrong with what a command did."""
        ended = self.run(command)
        allowed = self.case.where.get(command, self.case.allowed)
        if ended.problem:
            yield ended.problem
        elif DEFECTS.search(ended.out + ended.err):
            yield f"no named error, exit code {ended.code}"
        elif ended.code not in allowed:
            yield f"exit code {ended.code}, not {sorted(allowed)}"
        elif ended.code and not re.search("error", ended.out + ended.err, re.IGNORECASE):
            yield f"exit code {ended.code} without an error"
        elif ended.code and not re.search(self.case.says, ended.out + ended.err):
            yield f"nothing of {self.case.says!r}"
        elif ended.code and list((self.root / command / "out").glob("*.safetensors")):
            yield "a refused model was written"
        elif not ended.code and (difference := self.differs(command, ended)):
            yield difference
        if (canary := canary_of(self.folder)).exists():
            canary.rmdir()
            yield "its code ran"
        if self.inputs() != self.before:
            yield "it changed its input"

    def differs(self, command: str, ended: Ended) -> str:
        """How a result is not that of a sound model with the same weights, where there is one."""
        if not self.case.same or self.case.kind not in ("model", "adapter"):
            return ""
        if (self.folder / LIKE).exists():
            if command not in ("eval", "generate", "chat"):
                return ""
            line = OF_MODELS[command](str(self.folder / LIKE), self.family / "b", self.data)
            stdin = TALKED if command == "chat" else ANSWERS
            right = run(line, self.root / f"{command}-like", stdin=stdin)
        else:
            right = reference(self.case.family, command, self.case.talks)
        found, expected = numbers(command, ended.out), numbers(command, right.out)
        return "" if equal(found, expected) else f"{found}, not {expected}"

    def told(self, command: str) -> str:
        """The problems of a command in one line, with the end of what it said."""
        found = list(self.problems(command))
        if not found:
            return ""
        said = (self.root / command / ".err").read_text(errors="replace").strip()
        return f"{command}: {'; '.join(found)} <- {said[-400:]}"


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hostile-references-")


@cache
def reference(family: str, command: str, talks: bool) -> Ended:
    """What a command says of the good model."""
    place = Path(_scratch().name) / f"{family}-{command}-{talks}"
    place.mkdir()
    case = Case("good", "model", lambda folder, good: str(good), family=family, talks=talks)
    return Trial(case, place).run(command)


def equal(found: Any, expected: Any) -> bool:
    """True if two results are the same but for rounding."""
    if isinstance(found, list) and isinstance(expected, list):
        pairs = zip(found, expected, strict=True)
        return all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs)
    return bool(found == expected)


def numbers(command: str, out: str) -> Any:
    """What a result says about the weights: a measurement, a text, or their hash."""
    if command == "eval":
        row = json.loads(out)["domains"][0]
        return [row["bits_per_byte"], row["nats_per_token"], row["accuracy"]]
    if command == "generate":
        return json.loads(out)["text"]
    if command == "chat":
        return out
    if command in ("merge", "merge-first", "merge-base"):
        return json.loads(out)["merged"][0]["sha256"]
    return ""


# -- the tests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_a_command_ends_well_or_says_why(case: Case, tmp_path: Path) -> None:
    trial = Trial(case, tmp_path)
    problems = [told for command in sampled(case) if (told := trial.told(command))]
    assert not problems, "\n".join(problems)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_command_ends_well_or_says_why(case: Case, tmp_path: Path) -> None:
    trial = Trial(case, tmp_path)
    problems = [told for command in COMMANDS[case.kind] if (told := trial.told(command))]
    assert not problems, "\n".join(problems)


# They refuse many models that the others open, so only how they end is looked at.
OF_MODELS_SENT: dict[str, Line] = {
    "export": lambda bad, good, data: ["export", bad, "out/x.gguf"],
    "push": lambda bad, good, data: ["push", bad, "me/mine", "--dry-run"],
}


def shipping_problems(case: Case, root: Path) -> str:
    """What goes wrong when a model is exported, or about to be uploaded."""
    trial, problems = Trial(case, root), list[str]()
    for command, line in OF_MODELS_SENT.items():
        ended = run(line(trial.ref, trial.family / "b", ""), root / command)
        if ended.problem or DEFECTS.search(ended.out + ended.err):
            problems.append(f"{command}: {ended.problem or ended.err[-400:]}")
        if ended.code and list((root / command).glob("out/*")):
            problems.append(f"{command}: a refused model was written")
    if canary_of(trial.folder).exists() or trial.inputs() != trial.before:
        problems.append("its code ran, or the input was changed")
    return "; ".join(problems)


OF_MODEL_KINDS = [case for case in CASES if case.kind in ("model", "adapter")]


@pytest.mark.parametrize("case", OF_MODEL_KINDS[::30], ids=lambda case: case.name)
def test_shipping_ends_well_or_says_why(case: Case, tmp_path: Path) -> None:
    assert shipping_problems(case, tmp_path) == ""


@pytest.mark.soak
@pytest.mark.parametrize("case", OF_MODEL_KINDS, ids=lambda case: case.name)
def test_shipping_of_every_model_ends_well_or_says_why(case: Case, tmp_path: Path) -> None:
    assert shipping_problems(case, tmp_path) == ""


def test_every_command_is_tried_on_many_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) > 150
    for kind, commands in COMMANDS.items():
        tried = [command for case in CASES if case.kind == kind for command in sampled(case)]
        assert all(tried.count(command) >= 5 for command in commands), kind


# -- a problem is seen ----------------------------------------------------------------------------


def acting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, act: Callable[[Path], object]) -> str:
    """What is told of a `forge eval` that does this to the folder of a good model."""
    trial = Trial(Case("good", "model", _copy, allowed=RIGHT), tmp_path)
    reference("llama", "eval", False)  # by the real one
    monkeypatch.setattr(cli, "main", lambda: act(trial.folder))
    return trial.told("eval")


def _copy(folder: Path, good: Path) -> str:
    return str(copied(good, folder / BAD))


def _error(code: int, *lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr)  # noqa: T201
    sys.exit(code)


def _run_file(content: str) -> None:
    Path("evil.py").write_text(content)
    runpy.run_path("evil.py")


def _number(folder: Path) -> None:
    """Another number than that of the model."""
    row = {"bits_per_byte": 1.0, "nats_per_token": 1.0, "accuracy": 0.0}
    print(json.dumps({"domains": [row]}))  # noqa: T201
    sys.exit(0)


def _half_written(folder: Path) -> None:
    Path("out").mkdir()
    Path("out", WEIGHTS).write_text("x")
    _error(4, "error: it is hostile")


ACTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a number of other weights": (_number, r", not \[10\."),
    "an exit code": (lambda folder: _error(4, "error: damaged"), r"exit code 4, not \[0\]"),
    "a defect": (lambda folder: _error(1, "next: this is a defect"), "no named error"),
    "a traceback": (lambda folder: 1 / 0, "no named error, exit code 70"),
    "a question": (lambda folder: input(), "asked a question"),
    "a question of trust": (lambda folder: _error(2, "error: run it? [y/N]"), "asked for trust"),
    "the network": (lambda folder: socket.create_connection(("x", 1)), "went to the network"),
    "code that runs": (lambda folder: _run_file(singing(folder)), "its code ran"),
    "a pickle that runs": (lambda folder: pickle.loads(pickled(folder)), "its code ran"),
    "a changed file": (lambda f: (f / BAD / WEIGHTS).write_text("x"), "it changed its input"),
    "a new file": (lambda folder: (folder / "new").write_text("x"), "it changed its input"),
    "waiting": (lambda folder: time.sleep(60), "it takes more than 1 s"),
    "working": (lambda folder: [n for n in itertools.count() if n < 0], "it takes more than 1 s"),
    "memory": (lambda folder: bytearray(os.urandom(1) * 90_000_000), "more than 50,000,000 bytes"),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_problem_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SECONDS", 1.0)
    monkeypatch.setattr(f"{__name__}.MEMORY_BYTES", 50_000_000)
    act, told = ACTS[name]
    assert re.search(told, acting(monkeypatch, tmp_path, act))


def test_errors_have_words_and_leave_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(Case("bad", "model", _copy, says="hostile"), tmp_path)
    for number, (act, told) in enumerate(
        (
            (lambda: sys.exit(4), "exit code 4 without an error"),
            (lambda: _error(4, "error: damaged"), "nothing of 'hostile'"),
            (lambda: _half_written(trial.folder), "a refused model was written"),
            (lambda: _error(4, "error: it is hostile"), ""),
        )
    ):
        monkeypatch.setattr(cli, "main", act)
        trial.root = tmp_path / str(number)
        trial.root.mkdir()
        assert told in (found := trial.told("merge")) and bool(told) == bool(found)
