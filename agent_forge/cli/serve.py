"""`forge serve`: runs and models for other programs, over HTTP, WebSocket and MCP."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import socket
from pathlib import Path
from typing import Any

import typer

from agent_forge.errors import AlreadyInUse, ConfigError, NotFound

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NEEDED = {"api": ("fastapi", "uvicorn", "websockets"), "mcp": ("mcp",)}
MOST_CONNECTIONS = 512
PATIENCE_S = 5  # for replies that are being written when it is stopped


def serve(
    host: str,
    port: int,
    token: str,
    served: list[str],
    tools: bool,
    queue: int,
    memory: float,
    mcp: bool,
    storage: Path,
) -> None:
    """Serve runs and models: REST, WebSocket, OpenAI's API, or MCP."""
    _require("mcp" if mcp else "api")
    if host not in LOOPBACK and not token and not mcp:
        hint = "--token or FORGE_TOKEN, which clients then send as their API key"
        raise ConfigError(f"--host {host} lets others in, so a token is needed", hint=hint)
    if token and (len(token) < 8 or not (token.isascii() and token.isprintable()) or " " in token):
        raise ConfigError("a token has at least 8 characters: letters, digits and signs")
    from agent_forge.store.paths import require_root
    from agent_forge.store.sessions import SessionStore

    store = SessionStore(storage.expanduser())
    require_root(store.root)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how a server ends
        if mcp:
            from agent_forge.api.mcp_server import mcp_server
            from agent_forge.model.catalog import Catalog

            return mcp_server(store, Catalog(store, served)).run()
        import uvicorn

        with listening(host, port) as listener:
            from agent_forge.api.app import Server, Serving, create_app

            options: dict[str, Any] = {"places": queue, "most_bytes": int(memory * 1e9)}
            app = create_app(Serving(store, served, token, run_tools=tools, **options))
            name, there = f"[{host}]" if ":" in host else host, listener.getsockname()[1]
            typer.echo(f"serving {storage} at http://{name}:{there} (Ctrl-C ends it)", err=True)
            settings = uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=PATIENCE_S,
                ws_max_size=1 << 16,
            )
            Server(settings, app.state.models.scheduler).run(sockets=[listener])


def _require(extra: str) -> None:
    missing = [name for name in NEEDED[extra] if importlib.util.find_spec(name) is None]
    if missing:
        problem = f"forge serve needs {', '.join(missing)}"
        raise NotFound(problem, hint=f"pip install 'agent-forge[{extra}]'")


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at this address, before anything that takes long."""
    try:
        *how, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(*how)  # with its protocol: asyncio then sends without delay
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(MOST_CONNECTIONS)  # who comes before it is ready waits
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            hint = "--port names another one, --port 0 takes any that is free"
            raise AlreadyInUse(f"port {port} of {host} is in use", hint=hint) from error
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    return listener
