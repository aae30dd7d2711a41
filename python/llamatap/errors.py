"""The errors of llamatap: one tree, each also derived from the built-in error that a caller would catch."""

from __future__ import annotations

__all__ = [
    "BusyError",
    "CancelledError",
    "ClosedError",
    "ContextFullError",
    "EngineError",
    "Error",
    "InvalidInputError",
    "MissingPackageError",
    "ModelLoadError",
    "ModelNotFoundError",
    "NotFiniteError",
    "OutOfMemoryError",
    "UnsupportedError",
]


class Error(Exception):
    """Base of all errors that llamatap raises by itself."""


class InvalidInputError(Error, ValueError):
    """An argument is wrong: the message says what was expected and what was found."""


class NotFiniteError(InvalidInputError):
    """The model computed NaN or infinity, from its own weights or from an embedding in the input."""


class UnsupportedError(Error, NotImplementedError):
    """The model, the build or the engine does not support the request."""


class MissingPackageError(UnsupportedError, ImportError):
    """A package is not installed: the message names the extra of llamatap that installs it."""


class ModelLoadError(Error, OSError):
    """The file cannot be loaded as a model: the message holds what the engine said."""


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """There is no such file."""


class ContextFullError(Error, MemoryError):
    """The tokens do not fit into the context: the message gives both numbers."""


class OutOfMemoryError(Error, MemoryError):
    """The request needs more memory than is available, and nothing was allocated. The message gives both
    numbers, unless the system itself refused."""


class BusyError(Error, RuntimeError):
    """Another thread or generation is using this object."""


class CancelledError(Error, RuntimeError):
    """The function that was given as `cancelled` returned True."""


class ClosedError(Error, ValueError):
    """The object was closed."""


class EngineError(Error, RuntimeError):
    """The engine failed in a way that the arguments do not explain."""
