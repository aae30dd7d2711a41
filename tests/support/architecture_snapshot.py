"""The committed findings for every architecture (tests/data/architectures.json)."""

from __future__ import annotations

import json
from typing import Any

from support.architecture_checks import SNAPSHOT_PATH
from support.tiny_models.registry import FILES

SNAPSHOT: dict[str, Any] = json.loads(SNAPSHOT_PATH.read_text())
OF_THE_ENGINE = sorted(name for name in SNAPSHOT if name not in FILES)
