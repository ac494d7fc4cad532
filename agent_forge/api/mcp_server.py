"""The read-only server for assistants, by the Model Context Protocol: runs and models.

Its tools tell what files of runs say, and change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

import agent_forge
from agent_forge.api import runs
from agent_forge.errors import ForgeError
from agent_forge.model.catalog import Catalog
from agent_forge.store.records import CARD
from agent_forge.store.sessions import SessionStore

READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)
MOST_CARD_BYTES = 1 << 18


def mcp_server(store: SessionStore, catalog: Catalog) -> MCPServer[Any]:
    """The server with its tools."""
    views = runs.Views(store)

    def list_runs() -> dict[str, Any]:
        """All runs of this storage root, newest first."""
        return {"runs": runs.run_rows(store)}

    def run_status(session: str) -> dict[str, Any]:
        """Where a run and each of its phases stand."""
        with views.of(session) as view:
            return runs.status(view)

    def run_results(session: str) -> dict[str, Any]:
        """What the finished phases of a run measured, with their verdicts and models."""
        with views.of(session) as view:
            return runs.all_results(view)

    def run_metrics(session: str, name: str = "") -> dict[str, Any]:
        """The newest value of every metric of a run; of one that is named, its course."""
        with views.of(session) as view:
            return runs.metrics(view, name or None)

    def list_models() -> dict[str, Any]:
        """All registered models."""
        names = ("model_id", "session_id", "phase_name", "parameters", "size_mb", "created_at")
        return {"models": [{name: row[name] for name in names} for row in catalog.rows()]}

    def model_card(model: str) -> str:
        """The card of a model: what it was made from and what was measured on it."""
        path = catalog.find(model) / CARD
        if path.is_symlink() or not path.is_file():
            return "this model has no card"
        with path.open("rb") as reader:
            return reader.read(MOST_CARD_BYTES).decode(errors="replace")

    server: MCPServer[Any] = MCPServer(
        "agent-forge",
        version=agent_forge.__version__,
        instructions="Runs and models of Agent Forge. Nothing can be changed from here.",
        log_level="WARNING",
    )
    for tool in (list_runs, run_status, run_results, run_metrics, list_models, model_card):
        server.add_tool(_told(tool), annotations=READ_ONLY)
    return server


def _told(tool: Callable[..., Any]) -> Callable[..., Any]:
    """The tool; what a user can mend is told to the assistant."""

    @functools.wraps(tool)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return tool(*arguments, **named)
        except ForgeError as error:
            raise ToolError(f"{error}; {error.hint}" if error.hint else str(error)) from error
        except OSError as error:
            raise ToolError(f"cannot be read: {error.strerror}") from error

    return call
