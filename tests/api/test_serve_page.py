"""The examples of docs/serve.md, asked of a server as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_forge.pipeline import jobs
from agent_forge.store import files
from tests.support.command_line import Forge
from tests.support.serving import MODEL, serving, small_model
from tests.support.toy_runs import folder, toy_run

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def blocks(language: str, address: str = "") -> list[str]:
    """The examples in a language, for a server with its run and its model."""
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(r"(localhost|127\.0\.0\.1):8083", address, text).replace("demo", "r")
    text = re.sub(r"\b\w+\.\w+\.r\b", MODEL, text)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_the_examples_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_model(tmp_path)
    toy_run(tmp_path)
    done: dict[str, Any] = {"status": "completed", "seconds": 1.0, "metrics": {}, "outputs": []}
    (folder(tmp_path) / "phase2_evomerge").mkdir()
    files.write_checked(folder(tmp_path) / "phase2_evomerge" / "state.json", done)
    line = {"phase": "evomerge", "step": 1, "time": 1.0, "metrics": {"generation/best_fitness": 1}}
    with (folder(tmp_path) / "metrics.jsonl").open("a") as more:
        more.write(json.dumps(line) + "\n")
    monkeypatch.setattr(jobs, "_spawn", lambda store, name, command: name)
    monkeypatch.setattr(jobs, "stop_run", lambda store, session: None)
    with serving(tmp_path) as server:
        (commands,) = [block for block in blocks("sh", server.address) if "curl" in block]
        asked = re.sub(r"\\\n", " ", commands).replace("curl ", "curl -sS --fail-with-body ")
        for command in asked.splitlines():
            found = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
            assert found.returncode == 0, (command, found.stdout, found.stderr)
            assert isinstance(json.loads(found.stdout), dict)
        follow, chat = blocks("python", server.address)
        names: dict[str, Any] = {}
        exec(follow.replace("asyncio.run(", "found = asyncio.run("), names)  # noqa: S102
        assert names["found"] > 0
        capsys.readouterr()
        exec(chat.replace("stream=True", "stream=True, max_tokens=20"), {})  # noqa: S102
        assert capsys.readouterr().out


def test_the_commands_are_as_the_page_has_them(forge: Forge) -> None:
    (server,) = blocks("json")
    told = json.loads(server)["mcpServers"]["agent-forge"]
    lines = [line for block in blocks("sh") for line in block.splitlines() if "forge serve" in line]
    lines += [" ".join([told["command"], *told["args"]])]
    assert len(lines) == 4
    known = forge("serve --help").out
    for line in lines:
        flags = re.findall(r" (--[a-z]+)", line.partition("#")[0])
        assert "forge serve" in line and all(flag in known for flag in flags)
