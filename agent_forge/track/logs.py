"""Structured logs: every message of the package as one JSON line in the run's log.jsonl.

Code logs through structlog (`structlog.stdlib.get_logger`) or the standard library; both arrive.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from agent_forge.errors import ForgeError
from agent_forge.store import files

LOG_FILE = "log.jsonl"
PROCESSORS: list[Any] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.format_exc_info,
]


class _FileHandler(logging.Handler):
    """Appends to the run's log; a full disk is for the run to notice, not for a log line."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            files.append(self._path, self.format(record).encode() + b"\n")
        except ForgeError:
            return
        except Exception:  # noqa: BLE001 - a malformed log call is no reason to stop a run
            self.handleError(record)


@contextlib.contextmanager
def logging_to(folder: Path, level: str = "INFO") -> Iterator[None]:
    """Send the package's log messages to the run directory while the block runs."""
    structlog.configure(
        processors=[*PROCESSORS, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = _FileHandler(folder / LOG_FILE)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=PROCESSORS,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(sort_keys=True, default=str),
            ],
        )
    )
    logger = logging.getLogger("agent_forge")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
