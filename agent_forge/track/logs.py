"""Every message of the package, by structlog or by logging, as a JSON line in log.jsonl."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog
from structlog.stdlib import ProcessorFormatter

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
    """Writes records to a file and tells warnings as events; whatever fails, the run goes on."""

    def __init__(self, path: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._path, self._tell = path, tell

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with contextlib.suppress(ForgeError):
                files.append(self._path, self.format(record).encode() + b"\n")
            if record.levelno >= logging.WARNING:
                fields = record.msg if isinstance(record.msg, dict) else {}
                details = {k: v for k, v in fields.items() if k not in HIDDEN}
                text = fields["event"] if fields else record.getMessage()
                self._tell({"event": "warning", "message": text, **details})
        except Exception:  # noqa: BLE001 - a malformed call, say
            self.handleError(record)


@contextlib.contextmanager
def logging_to(
    folder: Path, level: str = "INFO", tell: Callable[[dict[str, Any]], None] = lambda _: None
) -> Iterator[None]:
    """Send the package's log messages to the run directory, and warnings to `tell` as well."""
    structlog.configure(
        processors=[*PROCESSORS, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = _Handler(folder / LOG_FILE, tell)
    as_json = structlog.processors.JSONRenderer(sort_keys=True, default=str)
    last: list[Any] = [ProcessorFormatter.remove_processors_meta, as_json]
    handler.setFormatter(ProcessorFormatter(foreign_pre_chain=PROCESSORS, processors=last))
    logger = logging.getLogger("agent_forge")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
