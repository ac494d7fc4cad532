"""`forge push`, against a hub on this machine that speaks the same calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import save_file

from tests.support.command_line import Forge
from tests.support.gguf_models import make_gguf_model
from tests.support.hub_server import TOKEN, HubServer, hub_server

HEAD = "---\nbase_model:\n- a\n- b\nbase_model_relation: merge\n---\n# Mine\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_gguf_model(tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text(HEAD)
    (tmp_path / "m" / "more").mkdir()
    (tmp_path / "m" / "more" / "note.txt").write_text("said")
    (tmp_path / "m" / "empty.txt").write_text("")
    return tmp_path / "m"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # large files by LFS
        yield server


def content(folder: Path) -> dict[str, bytes]:
    paths = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths}


def test_the_bytes_arrive(
    model: Path, hub: HubServer, forge: Forge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    before = content(model)
    result = forge("push m me/mine --json")
    assert result.code == 0 and result.document["url"] == f"{hub.address}/me/mine"
    assert result.document["files"] == {name: len(data) for name, data in before.items()}
    assert hub.repos["me/mine"] == {"main": before} and hub.public["me/mine"]
    assert len(hub.large) >= 2 and any(r.startswith("PUT /upload/") for r in hub.requests)
    assert content(model) == before
    assert TOKEN not in result.out + result.err + caplog.text
    assert forge("push m me/mine").out == f"{hub.address}/me/mine\n"  # again


def test_what_is_hidden_stays(model: Path, hub: HubServer, forge: Forge) -> None:
    (model / ".env").write_text("SECRET=1")
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("x")
    (model / "m.gguf").write_bytes(b"an export of it")
    (model / "x.GGUF").write_bytes(b"another")
    (model / "Modelfile").write_text("FROM ./m.gguf")
    (model / "m.Modelfile").write_text("FROM ./m.gguf")
    assert forge("push m me/mine").code == 0
    pushed = hub.repos["me/mine"]["main"]
    assert not any(name.startswith(".") for name in pushed)
    assert not {"m.gguf", "x.GGUF", "Modelfile", "m.Modelfile"} & {*pushed}
    assert "model.safetensors" in pushed


@pytest.mark.parametrize(("target", "code"), [("/etc", 4), ("nowhere", 2), ("..", 4)])
def test_a_link_that_is_no_file_of_the_folder_is_refused(
    model: Path, hub: HubServer, forge: Forge, target: str, code: int
) -> None:
    (model / "extra").symlink_to(target)
    result = forge("push m me/mine --dry-run")
    assert result.code == code and "extra" in result.err and not hub.repos


def test_a_branch_and_a_private_repository(model: Path, hub: HubServer, forge: Forge) -> None:
    for _ in range(2):
        assert forge("push m me/mine --private --revision v1").code == 0
    assert not hub.public["me/mine"] and hub.repos["me/mine"]["main"] == {}
    assert hub.repos["me/mine"]["v1"] == content(model)


def test_private_is_no_wish(model: Path, hub: HubServer, forge: Forge) -> None:
    hub.repos["me/mine"], hub.public["me/mine"] = {"main": {}}, True
    result = forge("push m me/mine --private")
    assert result.code == 2 and "is there already, and public" in result.err
    assert hub.repos["me/mine"] == {"main": {}} and not hub.large


def test_a_dry_run_needs_no_network(
    model: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    said = forge("push m me/mine --dry-run --json").document
    assert said["card"]["base_model"] == ["a", "b"] and said["endpoint"] == "http://127.0.0.1:1"
    assert said["files"] == {name: len(data) for name, data in content(model).items()}
    told = forge("push m me/mine --dry-run")
    assert "model.safetensors" in told.out and "base_model_relation: merge" in told.err


@pytest.mark.parametrize("repo", ["a/b/c", "me/..", "me/a b", "-", "https://hf.co/me/x"])
def test_a_name_that_no_repository_has(
    model: Path, hub: HubServer, forge: Forge, repo: str
) -> None:
    assert forge(f"push m '{repo}'").code == 2 and hub.requests == []


def test_only_whole_models_with_a_card_go_out(model: Path, hub: HubServer, forge: Forge) -> None:
    (model / "README.md").rename("card")
    result = forge("push m me/mine")
    assert result.code == 2 and "has no card" in result.err
    (model / "README.md").write_text("---\n: [\n---\n")
    assert forge("push m me/mine").code == 2
    Path("card").rename(model / "README.md")
    (model / "link").symlink_to("/etc/hostname")
    assert forge("push m me/mine").code == 4
    (model / "link").unlink()
    save_file({}, model / "model.safetensors")
    assert forge("push m me/mine").code == 4
    (model / "config.json").unlink()
    assert forge("push m me/mine").code == 2 and forge("push nowhere me/mine").code == 2
    assert hub.requests == []


def test_without_a_token(
    model: Path, hub: HubServer, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(model.parent / "none"))
    result = forge("push m me/mine")
    assert result.code == 2 and "there is no token" in result.err and "HF_TOKEN" in result.err
    assert hub.requests == []


@pytest.mark.parametrize(
    ("where", "status", "message"),
    [
        ("repos/create", 403, "You don't have the rights"),
        ("preupload", 403, "Forbidden"),
        ("/upload/", 403, "Expired"),
        ("/commit/", 400, "Bad card"),
        ("/objects/batch", 401, "Invalid token"),
    ],
)
def test_a_refusal_is_one_line(
    model: Path, hub: HubServer, forge: Forge, where: str, status: int, message: str
) -> None:
    hub.refuse[where] = status, message
    result = forge("push m you/mine")
    assert result.code == 1 and "Traceback" not in result.err and "defect" not in result.err
    assert TOKEN not in result.err and "signature" not in result.err
    assert where == "/upload/" or (str(status) in result.err and message in result.err)
    assert not hub.repos.get("you/mine", {}).get("main")


def test_no_network(model: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    result = forge("push m me/mine")
    assert (
        result.code == 1 and "was not uploaded to http://127.0.0.1:1 (ConnectError)" in result.err
    )
    assert "check the connection" in result.err
