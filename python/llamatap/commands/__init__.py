"""The commands of ``llamatap``, one module each.

A command is a module with ``add(commands)``, which adds its parser and sets ``run`` as its default, and
``run(arguments) -> int``, which returns the exit status. ``main`` prints a :class:`llamatap.Error` or an
``OSError`` of ``run`` in one line. All modules are imported for every command, so slow imports belong into
``run``.
"""

from __future__ import annotations

from llamatap.commands import (
    build_config,
    conversations,
    convert,
    cotrain,
    dataset,
    demo,
    encode,
    extract,
    fetch,
    generate,
    info,
    serve,
    train,
)

__all__ = ["COMMANDS"]

#: In the order in which the help lists them.
COMMANDS = (
    info,
    extract,
    encode,
    dataset,
    generate,
    serve,
    conversations,
    train,
    cotrain,
    convert,
    fetch,
    demo,
    build_config,
)
