"""llamatap taps llama.cpp: the hidden states of any layer of any GGUF model, as NumPy arrays."""

from __future__ import annotations

from llamatap._native import _core, build_config
from llamatap.context import Batch, Context
from llamatap.drafting.any_drafter import AnyDrafter
from llamatap.drafting.chain import DrafterChain
from llamatap.drafting.drafter import Draft, Drafter, DraftRequest
from llamatap.drafting.model_drafters import (
    DFlashDrafter,
    Eagle3Drafter,
    ModelDrafter,
    MtpDrafter,
    SpeculativeDrafter,
    load_drafter,
)
from llamatap.drafting.ngram import NGramDrafter
from llamatap.drafting.speculative_context import DraftOutput, SpeculativeContext
from llamatap.drafting.suffix import SuffixDrafter
from llamatap.drafting.text_drafters import CallableDrafter, TextDrafter
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
from llamatap.extraction.api import extract
from llamatap.extraction.extractor import Extractor
from llamatap.generation.api import generate
from llamatap.generation.results import Event, Generation, Stats, TokenLogprobs
from llamatap.generation.session import Session
from llamatap.kv_memory import Memory
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.probing import LayerProbe, Probe, probe
from llamatap.sampler import Sampler
from llamatap.states import States
from llamatap.tap import Tap

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
    "SuffixDrafter",
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
