"""The command line, second part: run, resume, stop, status, logs, phases and export."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from agent_forge.store import files, lock
from agent_forge.store.lock import STOP_FILE
from agent_forge.store.sessions import SessionStore
from tests.support.command_line import Forge
from tests.support.polling import until
from tests.support.surface import SURFACE
from tests.support.toy_runs import SMALL, die_at, exit_code, folder, forked, toy_run

FORGE = Path(sys.executable).parent / "forge"
TOY = "run --preset toy --session r " + " ".join(f"--set {s}" for s in SMALL)


@pytest.fixture
def done(root: Path) -> Path:
    """The storage root of a finished toy run `r`."""
    assert toy_run(root)["success"]
    return root


def test_a_run_from_start_to_end(forge: Forge, root: Path) -> None:
    result = forge(TOY + " --progress plain")
    assert result.code == 0
    row = r"(?m)^toy +train a linear model.* \d+ s\n  toy/final_loss \S+$"
    assert re.search(row, result.out) and "model: storage/sessions/r/toy/linear" in result.out
    assert len(result.out.splitlines()) <= 30
    assert "toy: phase completed" in result.err
    assert result.err.strip().endswith("done; next: forge show r")
    again = forge("resume r --progress none")
    assert again.code == 0 and "toy (done before)" in again.out


def test_a_run_as_json(forge: Forge) -> None:
    document = forge(TOY + " --json --progress none").document
    assert document["success"] and document["session_id"] == "r"
    (phase,) = document["phases"]
    assert phase["phase"] == "toy" and phase["metrics"]["toy/final_loss"] > 0
    assert document["phases"][0]["models"] == ["storage/sessions/r/toy/linear"]
    document = forge("resume r --json --progress none").document
    assert document["phases"][0]["skipped"]


def test_progress_modes(forge: Forge) -> None:
    err = forge(TOY + " --progress json").err
    steps = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [s["step"] for s in steps if s["event"] == "step"] == list(range(1, 25))
    result = forge("resume r --progress loud")
    assert result.code == 2 and "known: auto" in result.err


def test_the_config_can_come_from_anywhere(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("preset: toy\nphases: {toy: {steps: 2}}\n")
    assert forge("run --config c.yaml --session a --progress none").code == 0
    assert (tmp_path / "storage/sessions/a/toy/linear").is_dir()
    assert forge("run --config c.yaml --session b --storage other --progress none").code == 0
    assert (tmp_path / "other/sessions/b/toy/linear").is_dir()
    assert "--storage other" in forge("resume b --storage other --progress none").err


def test_one_phase_by_name(forge: Forge) -> None:
    assert forge("run --only toy --session a --set phases.toy.steps=2 --progress none").code == 0
    result = forge("run --from toy --session b --progress none")
    assert result.code == 2 and "not enabled" in result.err
    assert forge("run --preset toy --from toy --session c --progress none").code == 0
    assert forge("resume c --only toy --progress none").code == 0
    assert forge("resume c --from toy --progress none").code == 0
    result = forge("run --only tojy")
    assert result.code == 2 and "did you mean 'toy'" in result.err


def test_a_dry_run_says_all_and_does_nothing(forge: Forge, tmp_path: Path) -> None:
    result = forge(TOY + " --dry-run")
    assert result.code == 0 and re.search(r"toy +24 +20 +tiny", result.out)
    document = forge(TOY + " --dry-run --json").document
    assert document["phases"][0]["steps"] == 24 and document["free_bytes"] > 0
    assert document["config"]["phases"]["toy"]["width"] == 4
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_exist_is_said(forge: Forge) -> None:
    result = forge("run --only nothing")
    assert result.code == 2 and "unknown phase 'nothing'" in result.err
    result = forge("resume nothing")
    assert result.code == 2 and "no session 'nothing'" in result.err


def test_any_storage_path_will_do(forge: Forge, tmp_path: Path) -> None:
    for n, name in enumerate(("it's here", "123", "null", "a b")):
        line = f"run --preset toy --set phases.toy.steps=2 --session s{n} --progress none"
        assert forge(f'{line} --storage "{name}"').code == 0
        assert (tmp_path / name / "sessions" / f"s{n}").is_dir()


def test_an_error_as_json_is_one_document(forge: Forge) -> None:
    document = forge("resume nobody --json").document
    assert document["exit_code"] == 2 and "nobody" in document["error"]


def test_what_is_intact_is_told_truly(forge: Forge) -> None:
    line = "run --preset toy --session d --progress none --set phases.toy.learning_rate=1e30"
    result = forge(line)
    assert result.code == 1 and "nothing to save yet" in result.err
    assert "next: forge logs d" in result.err


def test_odd_lines_are_stepped_over(forge: Forge, done: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        with (done / "sessions/r" / name).open("a") as file:
            file.write('{}\n{"metrics": [1], "event": "\\u001b[31m", "time": "x"}\n')
    assert forge("status r").code == 0
    result = forge("logs r --events")
    assert result.code == 0 and "\x1b" not in result.out


def test_phases_are_listed(forge: Forge) -> None:
    assert re.search(r"1 +cognate", forge("phases").out)
    rows = forge("phases --json").document["phases"]
    assert [row["number"] for row in rows] == list(range(9))
    available = [row["phase"] for row in rows if row["available"]]
    assert available == [
        "toy",
        "cognate",
        "evomerge",
        "quietstar",
        "bitnet",
        "forge",
        "baking",
        "edge",
        "final_compression",
    ]


@pytest.mark.slow
def test_a_paused_run_ends_with_130_and_the_next_command(tmp_path: Path) -> None:
    """The real script, a real Ctrl-C, and the way back."""
    sets = "--set phases.toy.steps=200000 --set storage.reserve_disk_mb=0"
    command = [FORGE, *f"run --preset toy --session r {sets}".split()]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    checkpoints = tmp_path / "storage/sessions/r/toy/checkpoints/main"
    until(lambda: list(checkpoints.glob("step_*")))
    busy = subprocess.run([FORGE, "resume", "r"], cwd=tmp_path, capture_output=True, text=True)
    assert busy.returncode == 6 and f"process {process.pid}" in busy.stderr
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "paused: stopped after step" in err and "next: forge resume r" in err
    assert "Traceback" not in err


def test_stop_asks_a_running_session(forge: Forge, root: Path) -> None:
    store = SessionStore(root)
    store.create({}, "", session_id="r")
    assert "is not running" in forge("stop r").err
    with lock.exclusive(store.path("r")):
        assert "will stop" in forge("stop r").err
        assert (store.path("r") / STOP_FILE).read_text() == str(os.getpid())
    assert forge("stop nobody").code == 2
    assert "is not running" in forge("stop r --storage storage").err


def test_status_tells_where_it_stands(forge: Forge, done: Path) -> None:
    short = forge("status")
    assert "status: completed" in short.out and "toy/final_loss" in short.out
    assert not re.search(r"toy/loss +24", short.out) and len(short.out.splitlines()) <= 30
    result = forge("status --metrics")
    assert re.search(r"toy/loss +24 +\S+", result.out)
    document = forge("status r --json").document
    assert document["metrics"]["toy/loss"]["step"] == 24
    assert forge("status x").code == 2
    assert forge("status --storage nowhere").code == 2


def test_status_of_what_is_damaged(forge: Forge, done: Path, root: Path) -> None:
    (folder(root) / "toy" / "state.json").write_text("{")
    assert re.search(r"^toy .* damaged$", forge("status r").out, re.MULTILINE)
    shutil.rmtree(root / "registry")
    found = forge("status r")
    assert found.code == 4 and "model_registry.db is damaged: missing" in found.err
    assert "forge doctor --repair" in found.err
    assert not (root / "registry").exists(), "looking creates nothing, and hides no damage"


@pytest.mark.parametrize("line", ["serve --port 0", "serve --mcp", "report r", "logs r", "stop r"])
def test_a_storage_that_is_a_file(forge: Forge, tmp_path: Path, line: str) -> None:
    (tmp_path / "file").write_text("")
    found = forge(f"{line} --storage file")
    assert found.code == 2 and found.err == "error: file is not a folder\n"


def test_an_interrupted_run_is_seen_as_such(forge: Forge, root: Path) -> None:
    exit_code(forked(lambda: toy_run(root, listener=die_at("step", 8))))
    assert "status: interrupted" in forge("status r").out
    assert "interrupted" in forge("ls").out


def test_logs_and_events(forge: Forge, done: Path) -> None:
    assert re.search(r"info +run ended .*status=completed", forge("logs r").out)
    assert json.loads(forge("logs r --json").out.splitlines()[-1])["event"] == "run ended"
    out = forge("logs r --events").out
    assert "toy: phase completed" in out and "run completed" in out
    assert forge("logs r -f").out == forge("logs r --follow --storage storage").out
    assert forge("logs nobody").code == 2


def test_following_ends_with_the_run(forge: Forge, root: Path) -> None:
    pid = forked(lambda: toy_run(root, "phases.toy.steps=400"))
    until((folder(root) / "events.jsonl").exists)
    out = forge("logs r --events --follow").out
    assert exit_code(pid) == 0 and "run started" in out and "run completed" in out


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {
            m.name: reader.read()
            for m in archive.getmembers()
            if (reader := archive.extractfile(m)) is not None
        }


def test_a_run_and_a_model_become_an_archive(forge: Forge, done: Path, tmp_path: Path) -> None:
    assert "r/session.json" in forge("export r run.tar.gz").out
    found = members(tmp_path / "run.tar.gz")
    manifest = json.loads(found.pop("manifest.json"))["files"]
    assert set(found) == set(manifest) and "r/toy/linear/model.safetensors" in found
    for name, content in found.items():
        (tmp_path / "x").write_bytes(content)
        assert files.sha256_of(tmp_path / "x") == manifest[name]["sha256"]
    assert not any("run.lock" in name for name in found)
    document = forge("export toy.linear.r model.tar --json").document
    assert "linear/model.safetensors" in document["files"]
    assert members(tmp_path / "model.tar")["linear/model.safetensors"]


def test_an_archive_of_equal_content_is_equal(forge: Forge, done: Path, tmp_path: Path) -> None:
    for name in ("a.tar.gz", "b.tar.gz"):
        forge(f"export toy.linear.r {name} --storage storage")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()


def test_export_refuses_and_leaves_nothing_half(forge: Forge, done: Path, tmp_path: Path) -> None:
    assert forge("export r x.zip").code == 2
    assert forge("export nobody x.tar").code == 2
    assert forge("export r dry.tar --dry-run").code == 0
    assert forge("export r a.tar").code == 0
    assert forge("export r a.tar").code == 2
    assert forge("export r a.tar --force").code == 0
    (done / "sessions/r/toy/linear/model.safetensors").write_bytes(b"damaged")
    result = forge("export r b.tar")
    assert result.code == 4 and "model.safetensors" in result.err
    assert {p.name for p in tmp_path.iterdir()} == {"storage", "a.tar"}


@pytest.mark.parametrize("place", ["sessions/r/../../../priv", "/{0}/priv", "sessions/../../priv"])
def test_only_models_of_the_storage_are_exported(
    forge: Forge, done: Path, tmp_path: Path, place: str
) -> None:
    """A received registry may name any folder."""
    (tmp_path / "priv").mkdir()
    (tmp_path / "priv" / "diary.txt").write_text("private")
    with sqlite3.connect(done / "registry/model_registry.db") as connection:
        named = place.format(str(tmp_path).lstrip("/"))
        connection.execute("UPDATE models SET model_path = ?", (named,))
    result = forge("export toy.linear.r x.tar")
    assert result.code == 4 and "outside of the sessions" in result.err
    assert not (tmp_path / "x.tar").exists()


def test_an_exported_run_can_be_put_back(forge: Forge, done: Path, tmp_path: Path) -> None:
    forge("export r run.tar")
    with tarfile.open(tmp_path / "run.tar") as archive:
        archive.extractall(tmp_path / "other" / "sessions", filter="data")
    assert forge("doctor --repair --storage other").code == 0
    assert "completed" in forge("ls --storage other").out
    assert forge("show r --verify --storage other").code == 0
    assert forge("resume r --storage other --progress none").code == 0


def test_every_option_is_tried_somewhere() -> None:
    """No option stands in the frozen surface alone."""
    here = Path(__file__).parent
    paths = [*here.glob("test_*.py"), here.parent / "evals" / "test_evaluation.py"]
    for name in ("api", "phases/phase2_evomerge", "model", "native", "track"):
        paths += (here.parent / name).glob("test_*.py")
    text = "".join(path.read_text() for path in paths)
    options = {o for found in SURFACE.values() for o in found if o.startswith("-")}
    missing = [o for o in options if not re.search(rf"[ \"]{o}[ =\"{{]", text)]
    assert missing == []
