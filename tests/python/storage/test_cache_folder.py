"""Where fetched models and hashes are kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llamatap.storage.cache_folder import cache_folder


@pytest.mark.parametrize(
    ("variables", "platform", "expected"),
    [
        ({"LLAMATAP_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "linux", "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "linux", "/b/llamatap"),
        ({"XDG_CACHE_HOME": "/b"}, "darwin", "/b/llamatap"),
        ({"XDG_CACHE_HOME": ""}, "linux", "/home/me/.cache/llamatap"),
        ({}, "darwin", "/home/me/Library/Caches/llamatap"),
    ],
)
def test_the_folder_is_the_users_choice_or_the_systems_usual_one(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], platform: str, expected: str
) -> None:
    for name in ("LLAMATAP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert cache_folder() == Path(expected)
