"""`forge dashboard`: what it refuses, and the real command with what it answers to."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.typing import Origin

from agent_forge.cli import dashboard
from tests.support.command_line import Forge
from tests.support.polling import until


def test_without_the_extra(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == "streamlit" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    ended = forge("dashboard")
    assert ended.code == 2 and "needs streamlit" in ended.err
    assert "pip install 'agent-forge[dashboard]'" in ended.err


def test_a_port_that_is_in_use(forge: Forge) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ended = forge(f"dashboard --port {port} --no-browser")
    assert ended.code == 6 and f"port {port} of 127.0.0.1 is in use" in ended.err
    assert "--port" in ended.err


def test_a_storage_that_is_a_file(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "storage").write_text("")
    ended = forge("dashboard --storage storage")
    assert ended.code == 2 and "storage is not a folder" in ended.err


@pytest.mark.parametrize(
    ("flag", "display", "headless"),
    [("", ":0", False), ("--no-browser", ":0", True), ("", "", True)],
)
def test_a_browser_is_opened_where_there_is_one(
    forge: Forge, monkeypatch: pytest.MonkeyPatch, flag: str, display: str, headless: bool
) -> None:
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    asked: list[bool] = []
    monkeypatch.setattr(dashboard, "_serve", lambda port, headless: asked.append(headless))
    assert forge(f"dashboard --port 0 {flag}").code == 0
    assert asked == [headless]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, Path]]:
    """The real command, as a process; it, its address and its home."""
    home = tmp_path_factory.mktemp("home")
    (home / ".streamlit").mkdir()  # what a folder that was downloaded may bring along
    (home / ".streamlit" / "config.toml").write_text('[server]\nbaseUrlPath = "elsewhere"\n')
    command = [sys.executable, "-m", "agent_forge", "dashboard", "--port", "0", "--no-browser"]
    root = Path(dashboard.__file__).parents[2]
    env = {"HOME": str(home), "PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    with (home / "said").open("wb") as said:
        process = subprocess.Popen(command, cwd=home, env=env, stdout=said, stderr=said)
    try:
        found = until(lambda: re.search(r"http://\S+", (home / "said").read_text()))
        until(lambda: _answers(found[0]))
        yield process, found[0], home
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return bool(_get(f"{url}/_stcore/health") == "ok")
    except OSError:
        return False


def _get(url: str, content: bytes | None = None) -> str:
    with urllib.request.urlopen(url, content, timeout=10) as reply:
        return str(reply.read().decode())


async def _enter(url: str, origin: str, host: str = "") -> bool:
    """True if a page of this origin, or by this name of the server, may come in."""
    headers = {"Host": host} if host else {}
    place = f"{url.replace('http', 'ws')}/_stcore/stream"
    try:
        options: Any = {"origin": Origin(origin), "additional_headers": headers}
        async with websockets.connect(place, proxy=None, **options):
            return True
    except (websockets.InvalidStatus, websockets.ConnectionClosed):
        return False


def test_the_command(served: tuple[Any, str, Path]) -> None:
    process, url, home = served
    assert "<html" in _get(url)
    assert asyncio.run(_enter(url, url))
    assert not asyncio.run(_enter(url, "http://evil.example"))
    assert not asyncio.run(_enter(url, url, "evil.example"))
    with pytest.raises(urllib.error.HTTPError):
        _get(f"{url}/_stcore/upload_file/x/y", b"x")
    port = int(url.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect((_other_address(), port))
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert "Traceback" not in (home / "said").read_text()
    there = {p.name for p in home.iterdir()}
    assert there == {"said", ".streamlit"}, "it makes no files, and no storage"


def _other_address() -> str:
    return "127.0.0.2"  # of this machine too, but not the one that it listens at


def test_pages_load_no_torch() -> None:
    """The dashboard is light until somebody talks to a model."""
    program = (
        "import sys, importlib, pkgutil, agent_forge.ui.dashboard as pages\n"
        "for found in pkgutil.iter_modules(pages.__path__):\n"
        "    if found.name != 'app': importlib.import_module(f'{pages.__name__}.{found.name}')\n"
        "print(*({'torch', 'transformers', 'scipy', 'uvicorn'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
