"""`forge data traces`: worked thoughts to learn from, made here or by the models of an endpoint."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from agent_forge.cli.output import emit, plain
from agent_forge.errors import AlreadyExists, Cancelled, ConfigError, Interrupted
from agent_forge.track.progress import make_progress

if TYPE_CHECKING:
    from agent_forge.data.endpoint import EndpointSettings
    from agent_forge.data.endpoint_cost import CostEstimate
    from agent_forge.data.endpoint_rows import GeneratedRows


def traces(
    out: Path,
    generate: bool,
    address: str | None,
    models: list[str],
    count: int,
    families: list[str],
    strategies: list[str],
    cost_cap: float | None,
    seed: int,
    sets: list[str],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write worked thoughts, made here or asked of an endpoint (--generate).

    With --generate the same command with the same --out goes on where it was left.
    """
    from agent_forge.data import traces as makers

    wanted = (families, strategies, count, seed)
    if not generate:
        if address or models or sets or cost_cap is not None:
            raise ConfigError("--endpoint, --model, --cost-cap and --set are for --generate")
        return _write_local(makers.local_rows(*wanted), out, count, dry_run, as_json)
    if address is None or not models:
        example = "--generate --endpoint https://host/api/v1 --model NAME"
        raise ConfigError("--generate needs an endpoint and a model", hint=example)
    given = {"base_url": address, "models": models, "seed": seed}
    given |= {} if cost_cap is None else {"cost_cap_usd": cost_cap}
    settings = _settings(given, sets)
    requests = list(makers.trace_requests(*wanted))
    _ask_endpoint(settings, requests, makers.accept_reply, out, dry_run, as_json)


def _write_local(rows: Any, out: Path, count: int, dry_run: bool, as_json: bool) -> None:
    from agent_forge.store import files

    if out.exists():
        raise AlreadyExists(f"{out} exists", hint="choose another file, or move it elsewhere")
    if dry_run:
        return emit(as_json, ("file", "rows"), [(out, count)], out=str(out), planned=count)
    with files.writing(out, replace=False) as writer:
        written = 0
        for row in rows:
            writer.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            written += 1
    emit(as_json, ("file", "rows"), [(out, written)], out=str(out), written=written)


def _settings(given: dict[str, Any], sets: list[str]) -> EndpointSettings:
    from agent_forge.config.load import merge, parse_set, validate
    from agent_forge.data.endpoint import EndpointSettings

    for item in sets:
        given = merge(given, parse_set(item))
    return validate(EndpointSettings, given, "the endpoint")


def _ask_endpoint(
    settings: EndpointSettings,
    requests: Sequence[Any],
    accept: Any,
    out: Path,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Say the most that the requests can cost, then send them. A signal is a request to stop."""
    from agent_forge.data import endpoint_rows
    from agent_forge.data.endpoint import Endpoint
    from agent_forge.pipeline.environment import StopSignals

    stopper = StopSignals()
    records = endpoint_rows.read_journal(out)
    endpoint = Endpoint(settings, should_stop=stopper)
    estimate = endpoint.estimate_cost(requests, endpoint_rows.finished(records))
    spent = endpoint_rows.spent_usd(records)
    if dry_run:
        return _show(estimate, spent, settings, as_json)
    typer.echo(_told(estimate, spent, settings), err=True)
    try:
        with make_progress("none" if as_json else "auto") as display, stopper.on_signals():
            display({"event": "loop", "name": "traces", "first": len(requests) - estimate.requests})

            def progress(done: int, total: int) -> None:
                display({"event": "step", "phase": "traces", "step": done, "total": total})

            result = endpoint_rows.generate_rows(endpoint, requests, accept, out, progress)
    except (KeyboardInterrupt, Interrupted):
        if not endpoint_rows.journal_path(out).exists():
            raise Cancelled("interrupted: nothing was sent") from None
        kept = endpoint_rows.finished(endpoint_rows.read_journal(out))
        done = sum(request.key in kept for request in requests)
        problem = f"paused: {done} of {len(requests)} requests are done, and kept"
        raise Interrupted(problem, hint=shlex.join(["forge", *sys.argv[1:]])) from None
    _report(result, out, as_json)


def _told(estimate: CostEstimate, spent_usd: float, settings: EndpointSettings) -> str:
    tokens = f"{estimate.prompt_tokens:,} tokens asked, {estimate.completion_tokens:,} answered"
    pace = f"{estimate.minutes:.1f} minutes at {settings.requests_per_minute:g} a minute"
    money = f"${estimate.usd:.4f}; ${spent_usd:.4f} of the cap of ${settings.cost_cap_usd:.4f}"
    return f"at most: {estimate.requests:,} requests, {tokens}, {pace}, {money} are spent"


def _show(
    estimate: CostEstimate, spent_usd: float, settings: EndpointSettings, as_json: bool
) -> None:
    """Print the estimate of a dry run."""
    facts = {**estimate._asdict(), "spent_usd": spent_usd, "cost_cap_usd": settings.cost_cap_usd}
    shown = [
        (name, f"{value:.4f}" if isinstance(value, float) else value)
        for name, value in facts.items()
    ]
    emit(as_json, ("at most", ""), shown, estimate=facts, settings=settings.model_dump())


def _report(result: GeneratedRows, out: Path, as_json: bool) -> None:
    rows = [("accepted", result.accepted), ("spent", f"${result.spent_usd:.6f}")]
    rows += [(f"rejected: {plain(reason)}", n) for reason, n in result.rejected.items()]
    emit(as_json, (str(out), ""), rows, out=str(out), **result._asdict())
