"""llamatap taps llama.cpp: the hidden states of any layer of any GGUF model, as NumPy arrays."""

from __future__ import annotations

from llamatap._native import _core, build_config
from llamatap.context import Batch, Context, Memory, Tap
from llamatap.errors import (
    BusyError,
    ClosedError,
    ContextFullError,
    EngineError,
    Error,
    InvalidInputError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedError,
)
from llamatap.extract import Extractor, extract
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.probe import LayerProbe, Probe, probe
from llamatap.sampler import Sampler
from llamatap.states import States

__version__: str = _core.build_info()["version"]

__all__ = [
    "Batch",
    "BusyError",
    "ClosedError",
    "Context",
    "ContextFullError",
    "EngineError",
    "Error",
    "Extractor",
    "InvalidInputError",
    "LayerId",
    "LayerProbe",
    "Memory",
    "Model",
    "ModelLoadError",
    "ModelNotFoundError",
    "Probe",
    "Sampler",
    "States",
    "Tap",
    "UnsupportedError",
    "__version__",
    "build_config",
    "extract",
    "probe",
]
