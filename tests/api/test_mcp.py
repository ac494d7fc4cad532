"""The server for assistants, asked by the client of the mcp package."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from agent_forge.api.mcp_server import mcp_server
from agent_forge.model.catalog import Catalog
from agent_forge.store.sessions import SessionStore
from tests.support.serving import MODEL, small_model
from tests.support.toy_runs import toy_run

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("list_runs", {}),
    ("run_status", {"session": "r"}),
    ("run_results", {"session": "r"}),
    ("run_metrics", {"session": "r"}),
    ("run_metrics", {"session": "r", "name": "phase/duration_seconds"}),
    ("list_models", {}),
    ("model_card", {"model": MODEL}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("run_status", {"session": "../x"}),
    ("run_results", {"session": "none"}),
    ("run_metrics", {"session": "r", "name": "none"}),
    ("model_card", {"model": "../../etc"}),
    ("model_card", {"model": "a\x00"}),
    ("stop_run", {"session": "r"}),
    ("run_status", {}),
]


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in root.rglob("*") if path.is_file() and "-shm" not in path.name)
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_assistants_read_and_never_write(tmp_path: Path) -> None:
    small_model(tmp_path)
    toy_run(tmp_path)
    store = SessionStore(tmp_path)
    before = contents(tmp_path)

    async def ask() -> dict[str, Any]:
        async with Client(mcp_server(store, Catalog(store))) as client:
            tools = (await client.list_tools()).tools
            assert {tool.name for tool in tools} == {name for name, _ in ASKED}
            assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
            assert all(tool.description for tool in tools)
            for name, given in REFUSED:
                assert (await client.call_tool(name, given)).is_error, (name, given)
            told = [(name, await client.call_tool(name, given)) for name, given in ASKED]
            assert not any(answer.is_error for _, answer in told)
            return {name: answer.content[0].text for name, answer in told}  # type: ignore[union-attr]

    told = asyncio.run(ask())
    assert contents(tmp_path) == before
    assert [row["session_id"] for row in json.loads(told["list_runs"])["runs"]] == ["r", "s1"]
    assert json.loads(told["run_status"])["status"] == "completed"
    assert "# small" in told["model_card"]
    (course,) = json.loads(told["run_metrics"])["metrics"]
    assert course["values"] == [course["latest"]]
    state = json.loads((tmp_path / "sessions/r/toy/state.json").read_text())
    assert json.loads(told["run_results"])["phases"][0]["metrics"] == state["metrics"]


@pytest.mark.slow
def test_the_command_speaks_it_on_stdin_and_stdout(tmp_path: Path) -> None:
    small_model(tmp_path)
    command = ["-m", "agent_forge", "serve", "--mcp", "--storage", str(tmp_path)]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    server = StdioServerParameters(command=sys.executable, args=command, env=environment)

    async def ask() -> Any:
        async with Client(server) as client:
            return await client.call_tool("list_models", {})

    answer = asyncio.run(ask())
    assert json.loads(answer.content[0].text)["models"][0]["model_id"] == MODEL
