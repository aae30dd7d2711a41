"""Hidden states on many machines, by Ray Data (``pip install "llamatap[ray]"``).

:func:`write` writes a data set as :func:`llamatap.dataset.write` does, computed by workers of a Ray cluster;
:class:`HiddenStates` is a stage for a Ray Data pipeline of one's own.

>>> from llamatap import dataset, ray                                                   # doctest: +SKIP
>>> ray.write("model.gguf", "chats.jsonl", "states", dataset.Options(), concurrency=8)  # doctest: +SKIP
"""

from __future__ import annotations

from llamatap.ray._stage import HiddenStates
from llamatap.ray._write import write

__all__ = ["HiddenStates", "write"]
