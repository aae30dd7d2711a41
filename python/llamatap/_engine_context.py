"""A context of the engine, and what the package shares of it beside the public :class:`llamatap.Context`.

The public class checks arguments; the modules that compute in a context get this object by :func:`engine_of`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from llamatap import _system_limits
from llamatap._native import NativeOwner, _core, flush_log, native_of
from llamatap.errors import BusyError, ClosedError
from llamatap.layers import LayerId, slots
from llamatap.loaded_model import LoadedModel
from llamatap.states import DTYPES, Source, States, typed_view

__all__ = ["Capture", "EngineContext", "EngineOwner", "engine_of"]

_HAS_OWNER = (
    "this context's memory is in use by a generation; end that first (exhaust or close() the iterator of "
    "generate(), or close the Session)"
)


@dataclass(eq=False)
class Capture:
    """The states that an open tap takes from each decode."""

    layers: tuple[LayerId, ...]
    rows: Literal["all", "outputs"]
    dtype: str
    #: States of the last decode; None before the first decode, and after a failed one.
    states: States | None = None


class EngineContext:
    """The engine's context with its capture, its room for outputs, and the generation that owns its memory.

    :param loaded: the model of the context.
    :param source: origin of the states that are captured here.
    :ivar model: the core's object of the model, which stays when the model is closed.
    """

    def __init__(self, native: _core.Context, loaded: LoadedModel, source: Source, n_seq_max: int) -> None:
        self._native: _core.Context | None = native
        self._loaded = loaded
        self.model = native_of(loaded)
        self.source = source
        self.n_layer = self.model.n_layer
        self._lock = threading.Lock()
        self._owner: weakref.ref[object] | None = None
        # Weak: a tap is closed when its last reference goes.
        self._capture: weakref.ref[Capture] | None = None
        # Room for outputs that the engine has allocated, or that was checked to be available.
        self._outputs_bytes = max(n_seq_max * self.model.n_vocab * 4, 32 << 20)

    @property
    def native(self) -> _core.Context:
        """The core's object.

        :raises ClosedError: the context was closed.
        """
        if self._native is None:
            raise ClosedError("the context was closed")
        return self._native

    @property
    def closed(self) -> bool:
        return self._native is None

    def close(self) -> None:
        self._native = None

    @functools.cached_property
    def layer_map(self) -> _core.LayerMap:
        """Map from each layer to the engine's graph node that gives it.

        :raises UnsupportedError: the model carries no single residual stream.
        """
        try:
            return self._loaded.layer_map
        except ClosedError:
            return _core.LayerMap.resolve(self.model)

    @property
    def owner(self) -> object | None:
        """The generation that owns the memory; None once no reference to it is left."""
        return None if self._owner is None else self._owner()

    def reserve(self, owner: object) -> bool:
        """Reserve the memory for `owner`, until :meth:`release` or until it is garbage collected. Returns
        False if another owner has it."""
        with self._lock:
            if self.owner is not None:
                return False
            self._owner = weakref.ref(owner)
            return True

    def release(self, owner: object) -> None:
        """End the reservation of `owner`; one of another owner stays."""
        if self.owner is owner:
            self._owner = None

    @property
    def writable(self) -> _core.Context:
        """The core's object, for calls that change its memory.

        :raises BusyError: a generation owns the memory.
        """
        native = self.native
        if self.owner is not None:
            raise BusyError(_HAS_OWNER)
        return native

    @property
    def capture(self) -> Capture | None:
        """The capture of the open tap; None when no tap is open."""
        return None if self._capture is None else self._capture()

    @capture.setter
    def capture(self, capture: Capture | None) -> None:
        self._capture = None if capture is None else weakref.ref(capture)

    def require_outputs(self, n_outputs: int, *, computed: bool = True) -> None:
        """Refuse outputs whose logits do not fit into memory: the engine allocates them when it decodes.

        :param computed: whether the decode computes the logits; the engine allocates room for them either
            way.
        :raises OutOfMemoryError: with both numbers.
        """
        rows = n_outputs + (min(n_outputs, self.native.n_ubatch) if computed else 0)
        needed = rows * self.model.n_vocab * 4
        if needed > self._outputs_bytes:
            _system_limits.require_memory(
                needed - self._outputs_bytes,
                f"the logits of {n_outputs} outputs take",
                "flag fewer entries of a batch as outputs, or decode it in parts",
            )
            self._outputs_bytes = needed

    def _require_room(self, batch: _core.Batch, capture: Capture | None) -> None:
        n_rows = len(batch)
        # A few rows always fit.
        if n_rows * self.model.n_vocab * 8 > self._outputs_bytes:
            self.require_outputs(sum(batch.outputs))
        if capture is not None:
            row_bytes = len(capture.layers) * self.model.n_embd * DTYPES[capture.dtype].itemsize
            what = f"{len(capture.layers)} layers, {capture.dtype}"
            _system_limits.require_memory(
                (n_rows if capture.rows == "all" else sum(batch.outputs)) * row_bytes,
                f"the states of a batch of {n_rows} entries ({what}) take",
                "tap fewer layers, or decode it in parts",
            )

    def decode(self, batch: _core.Batch) -> None:
        """Compute a batch, whoever owns the memory; an open tap gets its states.

        :raises OutOfMemoryError: its logits or states do not fit into memory.
        """
        native, capture = self.native, self.capture
        self._require_room(batch, capture)
        try:
            if capture is None:
                native.decode(batch)
                return
            capture.states = None
            array, tokens = native.decode_tapped(
                self.layer_map,
                slots(capture.layers, self.n_layer),
                capture.dtype,
                capture.rows == "outputs",
                batch,
            )
        finally:
            flush_log()
        array = typed_view(array, capture.dtype)
        capture.states = self.states(array, tokens, capture.layers, {"rows": capture.rows})

    def states(
        self,
        array: NDArray[Any],
        tokens: NDArray[np.int32],
        layers: Sequence[LayerId],
        details: dict[str, Any],
    ) -> States:
        """States that were captured here: `array` with this context's provenance."""
        return States(array, tokens, layers, n_layer=self.n_layer, source=self.source, details=details)


class EngineOwner(NativeOwner[_core.Context]):
    """Base of :class:`llamatap.Context`."""

    @abstractmethod
    def _get_engine(self) -> EngineContext:
        """The engine's context, for :func:`engine_of`; closed or not."""

    def _get_native(self) -> _core.Context:
        return self._get_engine().native


def engine_of(context: EngineOwner) -> EngineContext:
    """The engine's context of a public one, closed or not."""
    return context._get_engine()  # noqa: SLF001  same module
