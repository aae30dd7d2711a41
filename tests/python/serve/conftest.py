from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.generation import EXACT
from support.openai_clients import Client, client_of
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama


@pytest.fixture(scope="session")
def tiny_chat_path(tiny: TinyLlama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a chat template that only joins what messages say."""
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tiny.write(tmp_path_factory.mktemp("chat") / "tiny.gguf", chat_template=template)


@pytest.fixture(scope="module")
def served_path(tiny_path: Path) -> Path:
    """The file that `server` serves; a module whose tests need another one overrides this fixture."""
    return tiny_path


@pytest.fixture(scope="module")
def server(served_path: Path) -> Iterator[Running]:
    with running([tiny_options(served_path, context=EXACT)]) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    with client_of(server) as found:
        yield found
