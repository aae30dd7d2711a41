"""Logging of the server."""

from __future__ import annotations

import copy
import logging
import logging.config
import time

__all__ = ["OncePerSecond", "configure", "logger"]

logger = logging.getLogger("llamatap.serve")


class OncePerSecond(logging.Filter):
    """Filter: shows each kind of message once per second, because clients can cause them at any rate."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown; tracebacks and informational lines always are."""
        if record.levelno < logging.WARNING or record.exc_info:
            return True
        kind, now = (record.name, str(record.msg)[:100]), time.monotonic()
        if now - self._last.get(kind, -1.0) < 1.0:
            return False
        if len(self._last) > 1000:
            self._last.clear()
        self._last[kind] = now
        return True


def configure(verbose: bool) -> None:
    """Log the server's lines to stderr and requests to stdout; with ``verbose`` also the lines of the engine
    and uvicorn."""
    from uvicorn.config import LOGGING_CONFIG

    config = copy.deepcopy(LOGGING_CONFIG)
    level = "INFO" if verbose else "WARNING"
    config["filters"] = {"rate": {"()": OncePerSecond}}
    config["handlers"]["default"]["filters"] = ["rate"]
    config["loggers"]["uvicorn.error"] = {"level": level}
    config["loggers"]["llamatap"] = {"handlers": ["default"], "level": level, "propagate": False}
    config["loggers"]["llamatap.serve"] = {"level": "INFO"}
    config["loggers"]["llamatap.engine"] = {"level": level if verbose else "CRITICAL"}
    logging.config.dictConfig(config)
