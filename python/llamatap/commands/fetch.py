"""``llamatap fetch``: download a small model into the cache folder."""

from __future__ import annotations

import argparse

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("fetch", help="download a small model into the cache folder")
    parser.add_argument("name", help="smollm2")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap.fetch import fetch

    print(fetch(arguments.name))
    return 0
