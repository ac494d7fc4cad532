"""Structured logs: every message of the package as one JSON line in the run's log.jsonl.

Code logs through structlog (`structlog.stdlib.get_logger`) or the standard library; both arrive.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from agent_forge.errors import ForgeError
from agent_forge.store import files

LOG_FILE = "log.jsonl"
HIDDEN = ("event", "level", "logger", "timestamp")
PROCESSORS: list[Any] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


class _Handler(logging.Handler):
    """Passes records on; neither a full disk nor a malformed call may stop a run."""

    def __init__(self, level: int, write: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(level)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(record)
        except ForgeError:
            return
        except Exception:  # noqa: BLE001 - see above
            self.handleError(record)


def _as_event(record: logging.LogRecord) -> dict[str, Any]:
    """Return a warning in the form of an event."""
    message = record.msg if isinstance(record.msg, dict) else {"event": record.getMessage()}
    details = {k: v for k, v in message.items() if k not in HIDDEN}
    return {"event": "warning", "message": message["event"], **details}


@contextlib.contextmanager
def logging_to(
    folder: Path, level: str = "INFO", tell: Callable[[dict[str, Any]], None] = lambda _: None
) -> Iterator[None]:
    """Send the package's log messages to the run directory, and warnings to `tell` as well."""
    structlog.configure(
        processors=[*PROCESSORS, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=PROCESSORS,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(sort_keys=True, default=str),
        ],
    )

    def write(record: logging.LogRecord) -> None:
        files.append(folder / LOG_FILE, formatter.format(record).encode() + b"\n")

    handlers = (
        _Handler(logging.NOTSET, write),
        _Handler(logging.WARNING, lambda record: tell(_as_event(record))),
    )
    logger = logging.getLogger("agent_forge")
    before = logger.level
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.setLevel(before)
