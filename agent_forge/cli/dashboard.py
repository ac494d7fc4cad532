"""`forge dashboard`: runs and models in a browser."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

import typer

from agent_forge.cli.serve import listening
from agent_forge.errors import NotFound
from agent_forge.store.paths import require_root

HOST = "127.0.0.1"
DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
ASIDE = {"light": "#F4F6F8", "dark": "#1E2328"}  # behind the sidebar and within inputs
# Nothing leaves this machine, nothing is uploaded, no file is watched, no other page may ask.
OPTIONS: dict[str, Any] = {
    "server.address": HOST,
    "server.allowedHosts": ["localhost", HOST],
    "server.enableCORS": True,
    "server.enableXsrfProtection": True,
    "server.fileWatcherType": "none",
    "server.maxUploadSize": 1,
    "server.showEmailPrompt": False,
    "browser.gatherUsageStats": False,
    "client.toolbarMode": "viewer",
    "client.showErrorLinks": False,
    "global.developmentMode": False,
    "logger.hideWelcomeMessage": True,
    "logger.level": "error",
    "runner.magicEnabled": False,
    "theme.primaryColor": "#0072B2",
    "theme.baseFontSize": 15,
    "theme.headingFontSizes": ["1.7rem", "1.4rem", "1.2rem"],
    "theme.metricValueFontSize": "1.35rem",
}


def dashboard(port: int, no_browser: bool, storage: Path) -> None:
    """Show runs and models in a browser: progress, figures, models to talk to."""
    if importlib.util.find_spec("streamlit") is None:
        hint = "pip install 'agent-forge[dashboard]'"
        raise NotFound("forge dashboard needs streamlit", hint=hint)
    place = storage.expanduser().absolute()
    require_root(place)
    with listening(HOST, port) as listener:
        port = int(listener.getsockname()[1])
    os.environ["FORGE_STORAGE"] = str(place)
    _serve(port, headless=no_browser or not _has_display())


def _has_display() -> bool:
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, DISPLAYS))


def _serve(port: int, headless: bool) -> None:
    """Run streamlit until it is told to end."""
    from streamlit import config, net_util
    from streamlit.web import bootstrap

    import agent_forge.ui.dashboard as pages
    from agent_forge.ui.theme import GROUNDS

    net_util._external_ip = HOST  # which it would ask a server for
    config.get_config_files = lambda file_name: []  # settings of whatever folder it is started in
    options = {**OPTIONS, "server.port": port, "browser.serverPort": port}
    options["server.headless"] = headless
    for name, (ground, ink, line) in GROUNDS.items():
        colours = {"backgroundColor": ground, "textColor": ink, "borderColor": line}
        colours["secondaryBackgroundColor"] = ASIDE[name]
        options |= {f"theme.{name}.{key}": value for key, value in colours.items()}
    flags = {name.replace(".", "_"): value for name, value in options.items()}
    bootstrap.load_config_options(flags)
    logging.getLogger("streamlit").setLevel(config.get_option("logger.level").upper())
    typer.echo(f"dashboard at http://localhost:{port} (Ctrl-C ends it)", err=True)
    bootstrap.run(str(Path(pages.__file__).with_name("app.py")), False, [], flags)
