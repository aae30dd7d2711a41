"""llamatap taps llama.cpp: the hidden states of any layer of any GGUF model, as NumPy arrays."""

from __future__ import annotations

from llamatap._native import _core, build_config
from llamatap.context import Batch, Context, Memory, Tap
from llamatap.drafters import (
    AnyDrafter,
    CallableDrafter,
    Draft,
    Drafter,
    DrafterChain,
    DraftRequest,
    NGramDrafter,
    TextDrafter,
)
from llamatap.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    ContextFullError,
    EngineError,
    Error,
    InvalidInputError,
    MissingPackageError,
    ModelLoadError,
    ModelNotFoundError,
    NotFiniteError,
    OutOfMemoryError,
    UnsupportedError,
)
from llamatap.extract import Extractor, extract
from llamatap.generate import generate
from llamatap.generation import Event, Generation, Stats, TokenLogprobs
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.model_drafters import (
    DFlashDrafter,
    Eagle3Drafter,
    ModelDrafter,
    MtpDrafter,
    SpeculativeDrafter,
    load_drafter,
)
from llamatap.probe import LayerProbe, Probe, probe
from llamatap.sampler import Sampler
from llamatap.session import Session
from llamatap.speculative import DraftOutput, SpeculativeContext
from llamatap.states import States

__version__: str = _core.build_info()["version"]

__all__ = [
    "AnyDrafter",
    "Batch",
    "BusyError",
    "CallableDrafter",
    "CancelledError",
    "ClosedError",
    "Context",
    "ContextFullError",
    "DFlashDrafter",
    "Draft",
    "DraftOutput",
    "DraftRequest",
    "Drafter",
    "DrafterChain",
    "Eagle3Drafter",
    "EngineError",
    "Error",
    "Event",
    "Extractor",
    "Generation",
    "InvalidInputError",
    "LayerId",
    "LayerProbe",
    "Memory",
    "MissingPackageError",
    "Model",
    "ModelDrafter",
    "ModelLoadError",
    "ModelNotFoundError",
    "MtpDrafter",
    "NGramDrafter",
    "NotFiniteError",
    "OutOfMemoryError",
    "Probe",
    "Sampler",
    "Session",
    "SpeculativeContext",
    "SpeculativeDrafter",
    "States",
    "Stats",
    "Tap",
    "TextDrafter",
    "TokenLogprobs",
    "UnsupportedError",
    "__version__",
    "build_config",
    "extract",
    "generate",
    "load_drafter",
    "probe",
]
