"""Contexts: a model with a KV cache for its sequences, which decodes batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap import _system_limits
from llamatap import layers as layer_ids
from llamatap._closeable import Closeable
from llamatap._engine_context import Capture, EngineContext, EngineOwner
from llamatap._native import _core, flush_log, native_of
from llamatap._options import checked_options, takes_options
from llamatap._threads import thread_count
from llamatap._validate import choice, instance, integer
from llamatap.context_options import ContextOptions, engine_switch, fingerprint_of, provenance_of
from llamatap.kv_memory import Memory, sequence_id
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel, files_of
from llamatap.states import Source, dtype_name
from llamatap.storage import saved_sequences
from llamatap.tap import Tap

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Batch", "Context"]

Batch = _core.Batch


@takes_options(ContextOptions)
class Context(EngineOwner, Closeable):
    """A model with a KV cache for its sequences. One thread at a time: a second one gets BusyError.

    :param model: kept alive by the context.
    :options:
    :raises InvalidInputError: an option is out of range.
    :raises UnsupportedError: the engine cannot make such a context of this model.
    :raises OutOfMemoryError: it does not fit into memory; with both numbers and the largest ``n_ctx`` that
        does. This counts the KV cache, recurrent states, compute buffers, and outputs: ``n_outputs_max`` of
        them if given, else one per sequence.
    """

    def __init__(self, model: LoadedModel, **options: Unpack[ContextOptions]) -> None:
        instance("model", model, LoadedModel, "Model")
        chosen = checked_options(ContextOptions, options, "Context.__init__()")
        n_threads = thread_count(chosen["n_threads"])
        self.model = model
        self.n_seq_max = chosen["n_seq_max"]
        self.n_threads = n_threads
        self.type_k = chosen["type_k"]
        self.type_v = chosen["type_v"]
        self.kv_unified = chosen["kv_unified"]
        self.swa_full = chosen["swa_full"]
        self.n_rs_seq = chosen["n_rs_seq"]
        self.n_outputs_max = chosen["n_outputs_max"]
        arguments: dict[str, Any] = {**chosen, "n_threads": n_threads}
        try:
            native = _core.Context(
                native_of(model),
                flash_attention=engine_switch(arguments.pop("flash_attn")),
                **arguments,
                memory_available=_system_limits.available_memory(),
            )
        finally:
            flush_log()
        #: The options, with what the engine decided.
        self._used: dict[str, Any] = {**chosen, "flash_attn": native.flash_attention}
        facts = {
            "arch": model.arch,
            "file_type": model.file_type,
            **({} if model.weights is None else {"weights": model.weights}),
            "n_layer": model.n_layer,
            "n_embd": model.n_embd,
            "engine_commit": _core.build_info()["engine_commit"],
            "llamatap_version": _core.build_info()["version"],
            "backend": ", ".join(model.devices) or "CPU",
            **provenance_of(ContextOptions, self._used),
        }
        self._engine = EngineContext(native, model, Source(files_of(model), facts), self.n_seq_max)

    def _get_engine(self) -> EngineContext:
        return self._engine

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._engine.closed

    def close(self) -> None:
        """Free the context. Arrays that were captured stay valid."""
        self._engine.close()

    def __repr__(self) -> str:
        if self.closed:
            return "Context(closed)"
        return f"Context({self.model.path.name!r}, n_ctx={self.n_ctx}, n_seq_max={self.n_seq_max})"

    @property
    def memory(self) -> Memory:
        """The KV cache or recurrent states of the context's sequences."""
        engine = self._engine
        return Memory(lambda: engine.native, lambda: engine.writable)

    @property
    def n_ctx(self) -> int:
        """Capacity in tokens, for all sequences together: the engine makes it a multiple of 256."""
        return self._engine.native.n_ctx

    @property
    def n_batch(self) -> int:
        """Maximum number of tokens in one engine call."""
        return self._engine.native.n_batch

    @property
    def n_ubatch(self) -> int:
        """Maximum number of tokens computed at once."""
        return self._engine.native.n_ubatch

    @property
    def flash_attn(self) -> bool:
        """Whether flash attention is in use."""
        return self._engine.native.flash_attention

    def decode(self, batch: Batch) -> None:
        """Compute a batch: its tokens enter the KV cache, its outputs get logits, an open tap gets its
        states.

        Batches of any size and order are split and arranged for the engine; results are in the order of the
        entries. Runs without the GIL; Ctrl-C ends it.

        :raises InvalidInputError: a token, position, sequence or width is wrong.
        :raises ContextFullError: it does not fit; with both numbers.
        :raises BusyError: another thread or a generation is using this context.

        After an error the memory is as before, except that a sequence of the batch is removed whole if the
        memory cannot remove a part of it (recurrent models, sliding windows without ``swa_full``):
        ``memory.last(seq)`` says which.
        """
        self._engine.writable  # noqa: B018  raises while a generation is using it
        instance("batch", batch, Batch)
        self._engine.decode(batch)

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """The logits of an entry of the last batch: float32 ``(n_vocab,)``, a copy.

        :param row: which entry; negative ones count from the end of the batch.
        :raises InvalidInputError: no such entry, or it was not an output.
        :raises UnsupportedError: the model has no output head (encoders).
        """
        return self._engine.native.logits(integer("row", row))

    def tap(
        self,
        layers: Iterable[LayerId] | LayerId = (-2,),
        rows: Literal["all", "outputs"] = "all",
        dtype: DTypeLike | str = np.float32,
    ) -> Tap:
        """Capture hidden states during the decodes inside a ``with`` block.

        :param layers: ids 0..n, negative from the end (-1 is H_n, pre-norm), ``"norm"`` for norm(H_n);
            any subset, in any order, repeats kept.
        :param rows: states of all entries of a batch, or only of its outputs (cheaper for H_n).
        :param dtype: float32, float16 or bfloat16.
        :raises InvalidInputError: a layer or dtype is wrong; or, when it is opened, another tap is open.

        Logits are the same as without a tap, except for rounding if H_n of all rows is requested: the batch
        is then split, so that the output head need not run on all rows.
        """
        choice("rows", rows, ("all", "outputs"))
        wanted = layer_ids.normalize(layers, self._engine.n_layer)
        self._engine.native  # noqa: B018  raises when closed
        return Tap(self._engine, Capture(wanted, rows, dtype_name(dtype)))

    def _fingerprint(self) -> dict[str, Any]:
        model = self._engine.model
        return {
            "arch": model.arch,
            "file_type": model.file_type,
            "n_layer": model.n_layer,
            "n_embd": model.n_embd,
            "weights": files_of(self.model).sampled_sha256,
            "converted_to": self.model.weights,
            **fingerprint_of(ContextOptions, self._used),
            "engine": _core.build_info()["engine_commit"],
        }

    def save(self, seq: int = 0) -> bytes:
        """Save the memory of a sequence, for :meth:`restore` in this context or one like it, under any id."""
        return saved_sequences.pack(self._fingerprint(), self._engine.native.save(sequence_id(seq)))

    def restore(self, seq: int, data: bytes | bytearray | memoryview) -> None:
        """Restore what :meth:`save` returned, in place of what the sequence holds.

        :raises InvalidInputError: the data is truncated or damaged, or was saved with another model, cache
            type or engine; the sequence is then unchanged.
        :raises BusyError: another thread or a generation is using this context.
        """
        native, seq = self._engine.writable, sequence_id(seq)
        state = saved_sequences.unpack(self._fingerprint(), data)
        try:
            native.restore(seq, state)
        finally:
            flush_log()
