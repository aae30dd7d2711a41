"""``llamatap build-config``: print how this build was made."""

from __future__ import annotations

import argparse
import json

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("build-config", help="how this build was made (JSON)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap import build_config

    print(json.dumps(build_config(), indent=2))
    return 0
