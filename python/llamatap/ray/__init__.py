"""Hidden states on several machines, with Ray Data (``pip install "llamatap[ray]"``).

:func:`write` writes a data set as :func:`llamatap.dataset.write` does, with workers of a Ray cluster;
:class:`HiddenStates` is a stage for your own Ray Data pipeline.

>>> from llamatap import dataset, ray                                                   # doctest: +SKIP
>>> ray.write("model.gguf", "chats.jsonl", "states", dataset.Options(), concurrency=8)  # doctest: +SKIP
"""

from __future__ import annotations

from llamatap.ray.cluster_write import write
from llamatap.ray.stage import HiddenStates

__all__ = ["HiddenStates", "write"]
