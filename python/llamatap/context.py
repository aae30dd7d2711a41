"""Contexts: a model with memory of its sequences, which decodes batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap import _system_limits
from llamatap import layers as layer_ids
from llamatap._closeable import Closeable
from llamatap._engine_context import Capture, EngineContext, EngineOwner
from llamatap._native import _core, flush_log, native_of
from llamatap._options import Option, checked_options, takes_options
from llamatap._threads import thread_count
from llamatap._validate import choice, instance, integer
from llamatap.kv_memory import Memory, sequence_id
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel, files_of
from llamatap.states import Source, dtype_name
from llamatap.storage import saved_sequences
from llamatap.tap import Tap

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Batch", "Context", "ContextOptions"]

Batch = _core.Batch


class ContextOptions(TypedDict, total=False):
    """The keyword arguments of :class:`Context`."""

    n_ctx: Annotated[
        int,
        Option(
            0,
            "tokens that fit, of all sequences together; 0 for what the model was trained with. The engine "
            "rounds up to 256; :attr:`n_ctx` tells",
            low=0,
        ),
    ]
    n_batch: Annotated[
        int,
        Option(
            2048,
            "the most tokens of one engine call, at least n_seq_max; larger batches take several",
            low=1,
        ),
    ]
    n_ubatch: Annotated[int, Option(512, "the most tokens computed at once", low=1)]
    n_seq_max: Annotated[int, Option(1, "sequence ids are 0..n_seq_max-1", low=1)]
    n_threads: Annotated[
        int | None,
        Option(
            None,
            "None for the number of physical cores, or what the CPU quota of a container pays for where that "
            "is less; more than there are CPUs, or than the quota, gets a RuntimeWarning",
            low=1,
        ),
    ]
    type_k: Annotated[
        str, Option("f16", "type of the K cache: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1")
    ]
    type_v: Annotated[str, Option("f16", "type of the V cache")]
    flash_attn: Annotated[bool | None, Option(None, "None leaves it to the engine")]
    kv_unified: Annotated[
        bool,
        Option(True, "one cache for all sequences; False gives each its own n_ctx / n_seq_max tokens"),
    ]
    swa_full: Annotated[
        bool,
        Option(True, "keep all positions of sliding-window layers, so that suffixes can be removed"),
    ]
    n_rs_seq: Annotated[
        int,
        Option(
            0, "how many tokens a recurrent or hybrid model can take back, where it does so exactly", low=0
        ),
    ]
    n_outputs_max: Annotated[
        int,
        Option(
            0,
            "the most outputs of one engine call, at least n_seq_max; 0 for n_batch. A small number saves "
            "memory in proportion to the vocabulary",
            low=0,
        ),
    ]


def engine_switch(value: bool | None) -> int:
    """A switch as the core takes it: -1 (the engine decides), 0 or 1."""
    return -1 if value is None else int(value)


@takes_options(ContextOptions)
class Context(EngineOwner, Closeable):
    """A model with memory of its sequences. One thread at a time: a second one gets BusyError.

    :param model: kept alive by the context.
    :options:
    :raises InvalidInputError: an option is out of range.
    :raises UnsupportedError: the engine cannot make such a context of this model.
    :raises OutOfMemoryError: it does not fit into memory; with both numbers and the largest ``n_ctx`` that
        does. Counted are the KV cache, recurrent states, compute buffers, and outputs: ``n_outputs_max`` of
        them where that was given, else one a sequence.
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
        facts = {
            "arch": model.arch,
            "file_type": model.file_type,
            **({} if model.weights is None else {"weights": model.weights}),
            "n_layer": model.n_layer,
            "n_embd": model.n_embd,
            "engine_commit": _core.build_info()["engine_commit"],
            "llamatap_version": _core.build_info()["version"],
            "backend": ", ".join(model.devices) or "CPU",
            "type_k": self.type_k,
            "type_v": self.type_v,
            "flash_attention": native.flash_attention,
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
        """The context's memory of its sequences."""
        engine = self._engine
        return Memory(lambda: engine.native, lambda: engine.writable)

    @property
    def n_ctx(self) -> int:
        """Tokens that fit, of all sequences together."""
        return self._engine.native.n_ctx

    @property
    def n_batch(self) -> int:
        """The most tokens of one engine call."""
        return self._engine.native.n_batch

    @property
    def n_ubatch(self) -> int:
        """The most tokens computed at once."""
        return self._engine.native.n_ubatch

    @property
    def flash_attn(self) -> bool:
        """Whether flash attention is in use."""
        return self._engine.native.flash_attention

    def decode(self, batch: Batch) -> None:
        """Compute a batch: its tokens enter the memory, its outputs get logits, an open tap its states.

        Batches of any size and order are cut and arranged for the engine; results are numbered as the
        entries are. Runs without the GIL; Ctrl-C ends it.

        :raises InvalidInputError: a token, position, sequence or width is wrong.
        :raises ContextFullError: it does not fit; with both numbers.
        :raises BusyError: another thread uses this context, or a generation is going on in it.

        After an error the memory is as before, save that a sequence of the batch is gone whole where the
        memory cannot give up a part of it (recurrent models, sliding windows without ``swa_full``).
        ``memory.last(seq)`` tells.
        """
        self._engine.writable  # noqa: B018  raises while a generation is going on
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
        """Capture hidden states during the decodes inside of a ``with`` block.

        :param layers: ids 0..n, negative from the end (-1 is H_n, pre-norm), ``"norm"`` for norm(H_n);
            any subset, in any order, repeats kept.
        :param rows: states of all entries of a batch, or of its outputs alone (cheaper for H_n).
        :param dtype: float32, float16 or bfloat16.
        :raises InvalidInputError: a layer or dtype is wrong; or, when it is opened, another tap is open.

        Logits are what they are without, but for rounding where H_n of all rows is asked for: that cuts the
        batch, so that it costs no output head on all rows.
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
            "type_k": self.type_k,
            "type_v": self.type_v,
            "kv_unified": self.kv_unified,
            "swa_full": self.swa_full,
            "flash_attn": self.flash_attn,
            "engine": _core.build_info()["engine_commit"],
        }

    def save(self, seq: int = 0) -> bytes:
        """The memory of a sequence, to be restored into this or a like context, under any id."""
        return saved_sequences.pack(self._fingerprint(), self._engine.native.save(sequence_id(seq)))

    def restore(self, seq: int, data: bytes | bytearray | memoryview) -> None:
        """Bring back what :meth:`save` gave, in place of what the sequence holds.

        :raises InvalidInputError: truncated or changed data, or that of another model, cache type or
            engine; the sequence is then as it was.
        :raises BusyError: another thread uses this context, or a generation is going on in it.
        """
        native, seq = self._engine.writable, sequence_id(seq)
        state = saved_sequences.unpack(self._fingerprint(), data)
        try:
            native.restore(seq, state)
        finally:
            flush_log()
