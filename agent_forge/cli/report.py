"""`forge report`: a run as one HTML file, for any browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from agent_forge.cli.output import emit_json, size


def report(session: str, out: Path | None, storage: Path, as_json: bool) -> None:
    """Write a report of a run: figures, verdicts, tables and samples in one HTML file."""
    from agent_forge.pipeline.evolution_view import EvolutionView, is_evolution
    from agent_forge.pipeline.run_view import RunView
    from agent_forge.store.sessions import SessionStore
    from agent_forge.ui.report import write_report

    own = is_evolution(Path(session))
    view = EvolutionView(Path(session)) if own else RunView(SessionStore(storage), session)
    path = write_report(view, out)
    if as_json:
        return emit_json(session_id=session, report=str(path), bytes=path.stat().st_size)
    print(path)
    typer.echo(f"{size(path.stat().st_size)}; open it in a browser", err=True)


def report_at_end(storage: Path, outcome: dict[str, Any]) -> Path | None:
    """The report of a run that has ended, in its directory; None if there is none, and never an
    error: the run is done."""
    from agent_forge.pipeline.run_view import RunView
    from agent_forge.store.sessions import SessionStore

    if outcome["status"] not in ("completed", "failed"):
        return None
    try:
        from agent_forge.ui.report import write_report

        return write_report(RunView(SessionStore(storage), outcome["session_id"]))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever is wrong, it is done
        typer.echo(f"no report was made: {error or 'interrupted'}", err=True)
        return None
