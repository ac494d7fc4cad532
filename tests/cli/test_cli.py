"""The command line as a user meets it: output, JSON, exit codes, and what it leaves on disk."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from agent_forge import __version__
from agent_forge.cli import doctor, main, runs
from agent_forge.pipeline.config import load_config
from agent_forge.store import files, lock
from agent_forge.store.cleanup import DAY_S
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.support.command_line import Forge, Result
from tests.support.documents import generate
from tests.support.pico import Pico
from tests.support.surface import SURFACE

FORGE = Path(sys.executable).parent / "forge"
MODEL = "cognate.m1.s1"
# A command with --json -> the keys of its document beside schema_version.
DOCUMENTS = {
    "validate": "config config_hash parameters valid",
    "ls": "sessions",
    "models": "models",
    "clean --dry-run": "bytes dry_run removed",
    "clean --yes": "bytes dry_run removed",
    "clean --cron": "crontab",
    "vacuum": "bytes_after bytes_before",
    "doctor": "findings healthy",
    "data ls": "data_dir datasets",
    "data verify": "data_dir verified",
}
SHOWN = {
    "s1": "bytes current_phase end_time handoffs kind models path progress_percent session_id"
    " start_time status tags",
    MODEL: "created_at kind metadata model_id model_name model_path parameters phase_name"
    " session_id size_mb tags",
}


@pytest.fixture
def stored(sessions: SessionStore, storage: ModelStorage) -> SessionStore:
    """s1 was interrupted and has a model, s2 is completed, s3 has failed."""
    storage.save_model(Pico(), "s1", "cognate", "m1", {}, tags=["best"])
    for name, status in (("s2", "completed"), ("s3", "failed")):
        sessions.create({}, "", session_id=name, tags=["night"])
        sessions.set_status(name, status)
    return sessions


def names(store: SessionStore) -> set[str]:
    """The sessions on disk; the registry has the same."""
    on_disk = {path.name for path in (store.root / "sessions").iterdir() if path.is_dir()}
    assert on_disk == {row["session_id"] for row in store.registry.get_all_sessions()}
    return on_disk


def make_older(store: SessionStore, session_id: str, days: float) -> None:
    connection = sqlite3.connect(store.registry.db_path)
    with connection:
        connection.execute(
            "UPDATE sessions SET start_time = start_time - ?1, end_time = end_time - ?1"
            " WHERE session_id = ?2",
            (days * DAY_S, session_id),
        )
    connection.close()


# -- the surface ----------------------------------------------------------------------------------


def test_the_command_line_is_frozen() -> None:
    found = {
        name: sorted(
            option
            for param in command.params
            for option in (
                [param.name]
                if param.param_type_name == "argument"
                else [*param.opts, *param.secondary_opts]
            )
        )
        for name, command in generate.commands().items()
    }
    assert found == SURFACE
    flags = {name: sum(o.startswith("-") for o in options) for name, options in found.items()}
    # evo: the specification's twelve, --set, --replicates and two of healing
    assert max(flags.values()) <= 16


@pytest.mark.parametrize("line", ["--help", *(f"{name} --help" for name in SURFACE)])
def test_help(line: str, forge: Forge) -> None:
    result = forge(line)
    assert (result.code, result.err) == (0, "")
    wanted = SURFACE.get(line.removesuffix(" --help"), [name.split()[0] for name in SURFACE])
    assert all(option in result.out for option in wanted)


def test_the_version(forge: Forge) -> None:
    result = forge("--version")
    assert (result.code, result.out.strip(), result.err) == (0, __version__, "")


def test_no_command_shows_the_help(forge: Forge) -> None:
    result = forge("")
    assert result.code == 2
    assert "Commands:" in result.out + result.err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nope", "nope"),
        ("ls --nope", "--nope"),
        ("ls extra", "extra"),
        ("show", "name"),
        ("clean --age -1", "--age"),
        ("clean --age soon", "--age"),
        ("validate --set", "--set"),
    ],
)
def test_usage_errors(line: str, told: str, forge: Forge) -> None:
    result = forge(line)
    assert (result.code, result.out) == (2, "")
    assert told in result.err and "Traceback" not in result.err


# -- quick ----------------------------------------------------------------------------------------

LIGHT = """
import sys
from agent_forge.cli import main
try:
    main()
except SystemExit as ended:
    code = ended.code
heavy = {"torch", "transformers", "pandas"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--help", 0),
        ("ls", 0),
        ("models", 0),
        ("show s1", 0),
        ("show nope", 2),
        ("validate", 0),
        ("clean --dry-run", 0),
        ("init --dry-run", 0),
        ("data ls", 0),
        ("data verify", 0),
        ("data show nope", 2),
    ],
)
def test_torch_is_not_imported(line: str, code: int, stored: SessionStore) -> None:
    command = [sys.executable, "-c", LIGHT, *line.split()]
    done = subprocess.run(command, cwd=stored.root.parent, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout or done.stderr


@pytest.mark.parametrize(
    ("line", "most"),
    [("--help", 0.7), ("ls", 0.7), ("clean --dry-run", 0.7), ("validate", 1.0)],
)
def test_answers_at_once(line: str, most: float, stored: SessionStore) -> None:
    """`validate` builds the settings of all eight phases."""

    def seconds() -> float:
        """CPU time, which other work on the machine changes less than the clock."""
        before = os.times()
        command = [str(FORGE), *line.split()]
        subprocess.run(command, cwd=stored.root.parent, check=True, capture_output=True)
        after = os.times()
        return (
            after.children_user
            + after.children_system
            - (before.children_user + before.children_system)
        )

    assert any(seconds() < most for _ in range(8))  # so the best of eight is


# -- what is printed ------------------------------------------------------------------------------


@pytest.mark.parametrize("line", DOCUMENTS)
def test_json_is_one_document(line: str, forge: Forge, request: pytest.FixtureRequest) -> None:
    for fixture in (None, "stored"):  # an empty storage, then one with sessions
        if fixture:
            request.getfixturevalue(fixture)
        result = forge(f"{line} --json")
        assert result.code == 0
        assert result.document["schema_version"] == 1
        assert sorted(result.document) == sorted(["schema_version", *DOCUMENTS[line].split()])


@pytest.mark.parametrize("name", SHOWN)
def test_show_as_json(name: str, forge: Forge, stored: SessionStore) -> None:
    document = forge(f"show {name} --json").document
    assert sorted(document) == sorted(["schema_version", *SHOWN[name].split()])
    assert forge(f"show {name} --verify --json").document["verified_files"] == (
        6 if name == "s1" else 5
    )


@pytest.mark.parametrize(
    "line",
    [
        *("ls", "models", "show x", "vacuum", "doctor", "validate", "init --dry-run"),
        *("data ls", "data verify", "data show x", "data fetch nope"),
        *("clean", "clean --dry-run", "clean --all --yes", "clean --cron", "validate --set x=1"),
    ],
)
def test_looking_creates_nothing(line: str, forge: Forge, tmp_path: Path) -> None:
    forge(line)
    forge(f"{line} --storage elsewhere/storage")
    assert list(tmp_path.iterdir()) == []


def test_ls(forge: Forge, stored: SessionStore) -> None:
    result = forge("ls")
    rows = [re.split(r" {2,}", line) for line in result.out.splitlines()]
    assert rows[0] == ["session", "status", "phase", "done", "started (UTC)", "tags"]
    assert [row[:2] for row in rows[1:]] == [
        ["s3", "failed"],
        ["s2", "completed"],
        ["s1", "interrupted"],  # running, but nobody holds its lock
    ]
    assert rows[1][3] == "0 %" and rows[1][5] == "night" and rows[3][5] == "-"
    with lock.exclusive(stored.path("s1")):
        assert forge("ls --json").document["sessions"][2]["status"] == "running"
    assert forge("ls --json").document["sessions"][2]["status"] == "interrupted"


def test_ls_of_an_empty_storage(forge: Forge) -> None:
    result = forge("ls")
    assert (result.code, result.out) == (0, "")
    assert result.err == "nothing is stored in storage yet\n"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", True),
        ("--phase cognate", True),
        ("--phase edge", False),
        ("--session s1", True),
        ("--session s2", False),
        ("--tag best", True),
        ("--tag worst", False),
        ("--text m1", True),
        ("--text M1", False),
    ],
)
def test_models(options: str, found: bool, forge: Forge, stored: SessionStore) -> None:
    rows = forge(f"models {options} --json").document["models"]
    assert [row["model_id"] for row in rows] == [MODEL] * found
    text = forge(f"models {options}").out
    assert (re.search(rf"{MODEL} +cognate +24 +\d+ B ", text) is not None) == found


def test_every_model_of_a_large_registry_is_there(forge: Forge, stored: SessionStore) -> None:
    rows = [(f"m{i}", "s2", "edge", f"m{i}", "x", time.time() + i, "{}", "") for i in range(1200)]
    columns = "model_id, session_id, phase_name, model_name, model_path, created_at, metadata_json"
    connection = sqlite3.connect(stored.registry.db_path)
    with connection:
        connection.executemany(
            f"INSERT INTO models ({columns}, tags) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows
        )
    connection.close()
    assert len(forge("models --json").document["models"]) == 1201
    assert forge(f"show {MODEL}").code == 0  # the oldest


def test_show_session_and_model(forge: Forge, stored: SessionStore) -> None:
    session = forge("show s1").out
    assert "kind: session\n" in session and "status: interrupted\n" in session
    assert f"models: \n    {MODEL}\n" in session and "end_time: -\n" in session
    model = forge(f"show {MODEL} --verify").out
    assert "kind: model\n" in model and "parameters: 24\n" in model and "tags: best\n" in model
    assert "verified_files: 5\n" in model
    assert re.search(r"created_at: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n", model)


def test_show_names_the_damaged_file(forge: Forge, stored: SessionStore) -> None:
    path = Path(stored.registry.get_model(MODEL)["model_path"]) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for name in ("s1", MODEL):
        assert forge(f"show {name}").code == 0  # nobody asked for a check
        result = forge(f"show {name} --verify")
        assert (result.code, result.out) == (4, "")
        assert "model.safetensors is damaged" in result.err


def test_storage_from_the_environment(
    forge: Forge, stored: SessionStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORGE_STORAGE", str(stored.root))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert len(forge("ls --json").document["sessions"]) == 3
    assert forge("ls --json --storage .").document["sessions"] == []  # the option is stronger


# -- clean and vacuum -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "going"),
    [
        ("", {"s2", "s3"}),
        ("--failed", {"s3"}),
        ("--age 60", {"s2"}),
        ("--age 60 --failed", {"s2", "s3"}),
        ("--age 1000", set()),
        ("--all", {"s1", "s2", "s3"}),
    ],
)
def test_clean(options: str, going: set[str], forge: Forge, stored: SessionStore) -> None:
    make_older(stored, "s1", 500)  # interrupted: it can be resumed, so its age does not count
    make_older(stored, "s2", 100)
    make_older(stored, "s3", 10)
    everything = {"s1", "s2", "s3"}
    dry = forge(f"clean {options} --dry-run --json").document
    assert {row["session_id"] for row in dry["removed"]} == going
    assert dry["dry_run"] is True and (dry["bytes"] > 0) == bool(going)
    assert names(stored) == everything
    refused = forge(f"clean {options}")
    assert refused.code == (2 if going else 0)
    assert ("deleting needs --yes" in refused.err) == bool(going)
    assert names(stored) == everything
    done = forge(f"clean {options} --yes --json").document
    assert done == {**dry, "dry_run": False}
    assert names(stored) == everything - going


def test_clean_says_what_goes_and_why(forge: Forge, stored: SessionStore) -> None:
    make_older(stored, "s2", 100)
    for options, words in (("--dry-run", "would free"), ("--yes", "freed")):
        result = forge(f"clean {options}")
        assert re.search(r"^s2 +\d+ B +completed 100 days ago$", result.out, re.MULTILINE)
        assert re.search(rf"^1 sessions, {words} \d+ B$", result.err, re.MULTILINE)
    assert forge("clean --yes").err == "0 sessions, freed 0 B\n"


def test_clean_follows_the_policy_of_a_config(forge: Forge, stored: SessionStore) -> None:
    make_older(stored, "s2", 2)
    assert forge("clean --dry-run --json").document["removed"] == []
    Path("c.yaml").write_text("cleanup_policy: {max_session_age_days: 1}\n")
    rows = forge("clean --dry-run --json --config c.yaml").document["removed"]
    assert [(row["session_id"], row["reason"]) for row in rows] == [("s2", "completed 2 days ago")]
    Path("c.yaml").write_text("cleanup_policy: {max_session_age_dayz: 1}\n")
    assert forge("clean --all --yes --config c.yaml").code == 2
    assert names(stored) == {"s1", "s2", "s3"}


def test_clean_leaves_a_running_session(forge: Forge, stored: SessionStore) -> None:
    with lock.exclusive(stored.path("s1")):
        assert forge("clean --all --yes").code == 0
    assert names(stored) == {"s1"}


@pytest.mark.parametrize(("answer", "left"), [("y\n", {"s1", "s2"}), ("n\n", {"s1", "s2", "s3"})])
def test_clean_asks_on_a_terminal(
    answer: str,
    left: set[str],
    forge: Forge,
    stored: SessionStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    result = forge("clean --failed")
    assert "remove 1 sessions" in result.err
    assert result.code == (0 if answer == "y\n" else 1)
    assert names(stored) == left


def test_clean_cron_line(forge: Forge, stored: SessionStore, tmp_path: Path) -> None:
    line = forge("clean --cron").out
    assert line == f"0 0 * * * {FORGE} clean --yes --storage {stored.root}\n"
    config = tmp_path / "100% mine.yaml"
    config.write_text("cleanup_policy: {schedule_cleanup: 5 4 * * sun}\n")
    line = forge(f"clean --cron --config '{config.name}'").out
    assert line.startswith("5 4 * * sun ") and line.count("\n") == 1
    assert r"100\% mine.yaml'" in line  # cron reads a bare % as the end of the command
    command = shlex.split(line.replace(r"\%", "%"))[6:]
    assert command == ["clean", "--yes", "--storage", str(stored.root), "--config", str(config)]
    assert names(stored) == {"s1", "s2", "s3"}


def test_vacuum(forge: Forge, stored: SessionStore) -> None:
    for i in range(20):
        stored.registry.create_session(f"big{i}", {"x": "y" * 10_000})
    for i in range(20):
        stored.registry.delete_session(f"big{i}")
    stored.registry.checkpoint_wal()  # what remains to be won are the free pages
    document = forge("vacuum --json").document
    assert document["bytes_after"] < document["bytes_before"] - 200_000
    assert document["bytes_after"] == sum(stored.registry.size_bytes())
    assert re.fullmatch(r"registry: \S+ kB -> \S+ kB\n", forge("vacuum").out)
    assert names(stored) == {"s1", "s2", "s3"}


# -- init and validate ----------------------------------------------------------------------------


def test_init_writes_a_folder_that_validates(forge: Forge, tmp_path: Path) -> None:
    result = forge("init conf --preset small --set runtime.seed=7")
    assert result.code == 0
    listed = result.out.split()
    assert listed[0] == "conf/pipeline_config.yaml"
    assert "conf/phase_configs/phase8_final_compression.yaml" in listed
    assert sorted(listed) == sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.yaml")
    )
    config = load_config(preset="small", sets=("runtime.seed=7",))
    document = forge("validate conf --json").document
    assert document["config"] == config.model_dump(mode="json")
    assert document["config_hash"] == config.canonical_hash()


def test_init_overwrites_only_by_force(forge: Forge, tmp_path: Path) -> None:
    dry = forge("init --dry-run")
    assert dry.code == 0 and list(tmp_path.iterdir()) == []
    assert forge("init").out == dry.out
    phase_file = tmp_path / "config" / "phase_configs" / "phase1_cognate.yaml"
    phase_file.write_text("mine")
    for line in ("init", "init --dry-run", "init --preset small"):
        result = forge(line)
        assert (result.code, result.out) == (2, "")
        assert "error: config/pipeline_config.yaml exists\nnext: --force" in result.err
    assert phase_file.read_text() == "mine"
    assert forge("validate config").code == 2
    assert forge("init --force --preset small").code == 0
    assert forge("validate config --json").document["config"]["preset"] == "small"


def test_init_leaves_a_file_in_the_way(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    result = forge("init notes --force")
    assert result.code == 2 and "error: notes exists and is not a folder" in result.err
    assert (tmp_path / "notes").read_text() == "mine"


def test_validate_prints_a_config_that_reads_back(forge: Forge, tmp_path: Path) -> None:
    result = forge("validate --preset smoke --set model.n_layers=3")
    (tmp_path / "c.yaml").write_text(result.out)
    config = load_config(preset="smoke", sets=("model.n_layers=3",))
    assert load_config(path=tmp_path / "c.yaml") == config
    assert f"valid, hash {config.canonical_hash()[:12]}, " in result.err
    assert f"{config.model.parameters():,} weights" in result.err


@pytest.mark.parametrize("options", ["", "--json"])
def test_validate_refuses(options: str, forge: Forge) -> None:
    result = forge(f"validate --set model.d_modle=1 --set runtime.seed=-1 {options}")
    assert result.code == 2 and (not result.out or result.document["exit_code"] == 2)
    assert "did you mean 'd_model'?" in result.err and "runtime.seed" in result.err


# -- doctor ---------------------------------------------------------------------------------------


def finding(result: Result, name: str) -> dict[str, str]:
    return next(f for f in result.document["findings"] if f["name"] == name)


def test_doctor_of_a_healthy_machine(forge: Forge, stored: SessionStore) -> None:
    text = forge("doctor")
    assert text.code == 0
    assert text.out.splitlines()[0].split() == ["what", "status", "found", "to", "get", "it"]
    result = forge("doctor --json")
    assert result.document["healthy"] is True
    rows = {row["name"]: row["status"] for row in result.document["findings"]}
    expected = {"python", "cpu", "memory", "disk", "torch", "registry"}
    expected |= {"sandbox", *doctor.EXTRAS}
    assert set(rows) == expected
    assert all(row["remedy"] for row in result.document["findings"] if row["status"] == "optional")
    assert all(re.search(rf"^{name} +{rows[name]} ", text.out, re.MULTILINE) for name in rows)


def test_doctor_names_the_extras_that_can_be_installed() -> None:
    project = tomllib.loads((Path(doctor.__file__).parents[2] / "pyproject.toml").read_text())
    assert {*project["project"]["optional-dependencies"]} == {*doctor.EXTRAS, "dev"}


def test_doctor_tells_extras_that_are_there(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"a": ("pytest", "x"), "b": ("wandbx", "y")})
    (tmp_path / "wandbx").mkdir()  # a folder of that name is no package
    monkeypatch.syspath_prepend(tmp_path)
    result = forge("doctor --json")
    assert finding(result, "a")["details"] == f"pytest {pytest.__version__}"
    assert finding(result, "b")["status"] == "optional"


@pytest.mark.parametrize("what", ["disk", "memory"])
def test_doctor_notices_that_room_is_short(
    what: str, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, f"LOW_{what.upper()}_BYTES", 10**18)
    result = forge("doctor --json")
    assert result.code == 1 and result.document["healthy"] is False
    assert finding(result, what)["status"] == "problem" and finding(result, what)["remedy"]


def test_doctor_without_torch(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = forge("doctor --json")
    assert result.code == 1
    assert finding(result, "torch")["remedy"] == "pip install torch"


def damage(store: SessionStore) -> bytes:
    content = b"not a database " * 1000
    store.registry.db_path.write_bytes(content)
    return content


def test_doctor_repairs_a_damaged_registry(forge: Forge, stored: SessionStore) -> None:
    content = damage(stored)
    listing = forge("ls")
    assert listing.code == 4 and "next: forge doctor --repair" in listing.err
    result = forge("doctor --json")
    assert result.code == 1
    assert finding(result, "registry")["status"] == "problem"
    assert "forge doctor --repair" in finding(result, "registry")["remedy"]

    result = forge("doctor --repair --json")
    assert result.code == 0
    assert "3 run directories, 4 entries added" in finding(result, "registry")["details"]
    aside = list(stored.registry.db_path.parent.glob("*.damaged-*"))
    assert [path.read_bytes() for path in aside] == [content]
    rows = forge("ls --json").document["sessions"]
    status = {row["session_id"]: row["status"] for row in rows}
    assert status == {"s1": "interrupted", "s2": "completed", "s3": "failed"}
    assert forge(f"show {MODEL} --verify").code == 0
    assert forge("doctor").code == 0


def test_doctor_waits_for_a_running_session(forge: Forge, stored: SessionStore) -> None:
    content = damage(stored)
    with lock.exclusive(stored.path("s1")):
        result = forge("doctor --repair --json")
    assert result.code == 1 and "in use" in finding(result, "registry")["details"]
    assert stored.registry.db_path.read_bytes() == content


def test_a_missing_registry_is_noticed(forge: Forge, stored: SessionStore) -> None:
    stored.registry.db_path.unlink()
    for line in ("ls", "models", "show s1", "clean --all --yes", "vacuum"):
        result = forge(line)
        assert (result.code, result.out) == (4, "")
        assert "model_registry.db is damaged: missing" in result.err
    assert forge("doctor").code == 1
    assert forge("doctor --repair").code == 0
    assert len(forge("ls --json").document["sessions"]) == 3


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["show nope", "--debug show nope", "show --debug nope"])
def test_an_error_says_what_and_next(line: str, forge: Forge, stored: SessionStore) -> None:
    result = forge(line)
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith("error: no session or model 'nope'\nnext: forge ls, forge models\n")
    assert ("Traceback" in result.err) == ("--debug" in line)


def test_an_error_without_a_next_step(forge: Forge) -> None:
    assert "next:" not in forge("validate --set x=1").err


def explode(*_: object) -> None:
    raise RuntimeError("boom")


def test_an_unexpected_exception(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_open", explode)
    result = forge("ls --json")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("unexpected RuntimeError: boom\nnext: ")
    assert "--debug" in result.err and "Traceback" not in result.err
    monkeypatch.setattr(sys, "argv", ["forge", "ls", "--debug"])
    with pytest.raises(RuntimeError, match="boom"):
        main()


def test_interrupt(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_open", interrupt)
    result = forge("ls")
    assert (result.code, result.err) == (1, "interrupted\n")  # there is nothing to resume
    assert forge("ls --json").document["exit_code"] == 1


def test_the_installed_script_fails_the_same_way(tmp_path: Path) -> None:
    command = [str(FORGE), "show", "nope", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and json.loads(done.stdout)["exit_code"] == 2
    assert "error: no session or model 'nope'" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_storage_is_refused(forge: Forge, stored: SessionStore) -> None:
    outside = stored.root.parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    files.disk.remove_tree(stored.path("s3"))
    (stored.root / "sessions" / "s3").symlink_to(outside)
    result = forge("clean --failed --yes")
    assert result.code == 4 and "is a link" in result.err
    assert (outside / "precious").read_text() == "mine"
