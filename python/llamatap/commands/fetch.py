"""``llamatap fetch``: download a small model into the cache folder."""

from __future__ import annotations

import argparse

from llamatap.commands._arguments import fetch_model

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("fetch", help="download a small model into the cache folder")
    parser.add_argument("name", help="smollm2")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    print(fetch_model(arguments.name))
    return 0
