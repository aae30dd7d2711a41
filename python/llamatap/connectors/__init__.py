"""Connectors: pass states to other processes through files, shared memory or a function.

A connector writes with ``put`` and reads with the methods of speculators' transfers: ``setup``,
``get_cached``, ``get_generated``, ``delete``. Other packages add connectors as entry points of the group
``llamatap.connectors``.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from llamatap._validate import shown
from llamatap.connectors.callback import CallbackConnector
from llamatap.connectors.collector import Collector
from llamatap.connectors.connector import Connector, Stored
from llamatap.connectors.dlpack import DLPackArray
from llamatap.connectors.files import FileConnector
from llamatap.connectors.shared_memory import SharedMemoryConnector
from llamatap.errors import InvalidInputError

__all__ = [
    "CallbackConnector",
    "Collector",
    "Connector",
    "DLPackArray",
    "FileConnector",
    "SharedMemoryConnector",
    "Stored",
    "connect",
    "connectors",
]


def connectors() -> dict[str, str]:
    """The installed connectors: names, and classes as ``module:class``."""
    return {entry.name: entry.value for entry in entry_points(group="llamatap.connectors")}


def connect(name: str, /, **options: Any) -> Connector:
    """Make a connector by its name.

    :param options: the options of its class, e.g. ``folder`` of "files".
    :raises InvalidInputError: there is no connector of that name, or an option is wrong.
    """
    found = [entry for entry in entry_points(group="llamatap.connectors") if entry.name == name]
    if not found:
        raise InvalidInputError(f"there is no connector {shown(name)}; there are {sorted(connectors())}")
    kind = found[0].load()
    made = kind(**options)
    if not isinstance(made, Connector):
        raise InvalidInputError(f"{found[0].value} is not a llamatap.connectors.Connector")
    return made
