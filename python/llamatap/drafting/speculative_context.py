"""The speculative context: a draft model beside a target, in one context for all sequences."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llamatap import _system_limits
from llamatap._closeable import Closeable
from llamatap._native import NativeOwner, _core, flush_log, native_of
from llamatap._options import checked_options, takes_options
from llamatap._threads import thread_count
from llamatap._validate import flag, instance, integer, shown
from llamatap._validate import path as checked_path
from llamatap.context import Context
from llamatap.context_options import ContextOption, engine_switch, fingerprint_of
from llamatap.convert.joined_drafts import joined_draft
from llamatap.convert.mtp_block import is_mtp_file
from llamatap.errors import ClosedError, InvalidInputError, UnsupportedError
from llamatap.kv_memory import Memory
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel, files_of
from llamatap.model import Model
from llamatap.storage import saved_sequences
from llamatap.tokenizer import token_array

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DraftContextOptions", "DraftOutput", "SpeculativeContext", "call_at_close", "load_draft"]


@dataclass(frozen=True, slots=True, eq=False)
class DraftOutput:
    """Result of :meth:`SpeculativeContext.decode`: one row for each output, in order. Arrays are owned.

    :ivar ids: int32 ``(n_outputs, top_k)``: the most likely tokens, most likely first. They are ids of the
        target, even if an EAGLE-3 file has its own, smaller vocabulary; a plain model whose vocabulary is
        padded further than the target's may give ids that the target does not have.
    :ivar probs: float32 ``(n_outputs, top_k)``: their probabilities, by a softmax over the logits.
    :ivar states: float32 ``(n_outputs, n_state)``: the states for the next pairs; None for a plain model.
    :ivar logits: None unless requested: float32 ``(n_outputs, spec.model.n_vocab)``, by the same ids; -inf
        for tokens that the draft cannot give.
    """

    ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    states: NDArray[np.float32] | None
    logits: NDArray[np.float32] | None


def _float_rows(name: str, values: ArrayLike) -> NDArray[np.float32]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidInputError(f"{name} must be a float32 matrix: {error}") from None
    if array.dtype != np.float32 or array.ndim != 2:
        raise InvalidInputError(f"{name} must be a float32 matrix, not {array.dtype} of shape {array.shape}")
    if not np.isfinite(array).all():
        # In the KV cache they would reach unrelated sequences.
        raise InvalidInputError(f"{name} contain NaN or infinity")
    return np.ascontiguousarray(array)


def _integers(name: str, values: ArrayLike) -> NDArray[np.int32]:
    try:
        return token_array(values)
    except InvalidInputError as error:
        raise InvalidInputError(str(error).replace("token ids", name)) from None


class DraftContextOptions(TypedDict, total=False):
    """Keyword arguments of :class:`SpeculativeContext`."""

    n_seq_max: Annotated[
        int | None,
        ContextOption(None, "sequence ids are 0..n_seq_max-1; None for the target's", low=1, recorded="no"),
    ]
    n_ctx: Annotated[int, ContextOption(0, "capacity in tokens; 0 for the target's", low=0, recorded="no")]
    n_ubatch: Annotated[
        int, ContextOption(128, "maximum number of tokens computed at once", low=1, recorded="no")
    ]
    n_threads: Annotated[int | None, ContextOption(None, "None for the target's", low=1, recorded="no")]
    type_k: Annotated[
        str, ContextOption("f16", "type of the K cache, as in :class:`Context`", recorded="saved")
    ]
    type_v: Annotated[str, ContextOption("f16", "type of the V cache", recorded="saved")]
    flash_attn: Annotated[bool | None, ContextOption(None, "None leaves it to the engine", recorded="no")]
    kv_unified: Annotated[
        bool | None,
        ContextOption(
            None,
            "as in :class:`Context`, for the draft's context. None for the target's value, except that it is "
            "True with a DFlash file, which then decodes the blocks of all sequences together, and False "
            "with "
            "a draft with sliding windows, where each sequence then has as much room as the target",
            recorded="no",
        ),
    ]
    n_gpu_layers: Annotated[
        int, ContextOption(0, "layers on the GPU, for a draft that is loaded from a file", recorded="no")
    ]
    as_model: Annotated[
        bool,
        ContextOption(False, "use the draft as a language model, with or without MTP blocks", recorded="no"),
    ]


def _memory_layout(
    context: Context, draft: LoadedModel, chosen: DraftContextOptions, n_seq_max: int
) -> tuple[bool, int]:
    """Whether the draft's KV cache is unified, and its capacity in tokens."""
    n_ctx = chosen["n_ctx"] or context.n_ctx
    if chosen["kv_unified"] is not None:
        return chosen["kv_unified"], n_ctx
    unified = context.kv_unified or draft.arch == "dflash"
    if unified and 0 < native_of(draft).n_swa < n_ctx and n_seq_max > 1:
        # In a unified KV cache, other sequences overwrite cells that are out of reach of the windows, and
        # nothing can be rolled back.
        return False, chosen["n_ctx"] or n_ctx * n_seq_max
    return unified, n_ctx


def load_draft(target: LoadedModel, draft: str | os.PathLike[str], *, n_gpu_layers: int = 0) -> Model:
    """Load a drafter's file.

    :param target: the model that it drafts for: an ``mtp.safetensors`` is joined with it.
    :raises Error: as :class:`SpeculativeContext`.
    """
    file = checked_path("path", draft)
    if is_mtp_file(file):
        file = joined_draft(file, files_of(target))
    return Model(file, load_mtp=True, n_gpu_layers=n_gpu_layers)


@takes_options(DraftContextOptions)
class SpeculativeContext(NativeOwner[_core.SpeculativeContext], Closeable):
    """A draft model beside a target: one context for all sequences, with the calls that drafting is built on.

    :param context: the target's context. It is kept alive: the draft may use its token embedding and output
        head.
    :param draft: the drafter's file, or a loaded model: an EAGLE-3 file (architecture ``eagle3``); MTP
        blocks, in a separate file or in the target's (``context.model``, loaded with ``load_mtp=True``); an
        MTP block's own weights (``mtp.safetensors``, :mod:`llamatap.convert.mtp_block`), which are joined
        with the target's in a file in the cache folder; a DFlash or DSpark file (``dflash``); or a smaller
        language model with the target's vocabulary.
    :options:
    :raises InvalidInputError: the draft does not fit the target (vocabulary, width, layers, d2t); with what
        was expected and found.
    :raises UnsupportedError: the engine cannot draft with this file.
    :raises ModelLoadError: the file cannot be loaded.
    :ivar target: the target's context.
    :ivar model: the draft model.
    :ivar n_seq_max: sequence ids are 0..n_seq_max-1.
    :ivar kind: how it drafts: "model", "eagle3", "mtp" or "dflash".
    :ivar target_layers: the target's states that it needs of every token, as layer ids of llamatap; empty for
        a plain model.

    Pairs: EAGLE-3 and MTP blocks decode a token together with a state. With ``state[p]`` the target's at
    position p (for EAGLE-3, :meth:`encode` of its features), EAGLE-3 takes ``(token[p+1], state[p])`` at
    position p, MTP ``(token[p], state[p-1])`` at position p, with zeros for ``state[-1]``. A plain model
    takes tokens alone. :meth:`encode` is for EAGLE-3 and MTP, :meth:`decode` for these and plain models. A
    DFlash file decodes no pairs and has neither: :class:`llamatap.DFlashDrafter` drafts with it.
    """

    def __init__(
        self,
        context: Context,
        draft: str | os.PathLike[str] | LoadedModel,
        **options: Unpack[DraftContextOptions],
    ) -> None:
        self._native: _core.SpeculativeContext | None = None
        self._at_close: list[weakref.WeakMethod[Callable[[], None]]] = []
        instance("context", context, Context)
        target = native_of(context)
        chosen = checked_options(DraftContextOptions, options, "SpeculativeContext()")
        self._owns_model = not isinstance(draft, LoadedModel)
        if not isinstance(draft, LoadedModel):
            draft = load_draft(context.model, draft, n_gpu_layers=chosen["n_gpu_layers"])
        self.target = context
        self.model = draft
        self.n_seq_max = chosen["n_seq_max"] or context.n_seq_max
        n_threads = chosen["n_threads"]
        self.n_threads = context.n_threads if n_threads is None else thread_count(n_threads)
        kv_unified, n_ctx = _memory_layout(context, draft, chosen, self.n_seq_max)
        n_ubatch = max(chosen["n_ubatch"], self.n_seq_max)
        try:
            self._native = _core.SpeculativeContext(
                target,
                native_of(draft),
                plain=chosen["as_model"],
                n_ctx=n_ctx,
                n_batch=max(n_ubatch, 512),
                n_ubatch=n_ubatch,
                n_seq_max=self.n_seq_max,
                n_threads=self.n_threads,
                type_k=chosen["type_k"],
                type_v=chosen["type_v"],
                flash_attention=engine_switch(chosen["flash_attn"]),
                kv_unified=kv_unified,
                memory_available=_system_limits.available_memory(),
            )
        finally:
            flush_log()
        self._arch = draft.arch
        self._used: dict[str, Any] = {**chosen}
        self.kind: Literal["model", "eagle3", "mtp", "dflash"] = self._native.kind  # type: ignore[assignment]
        n_layer = context.model.n_layer
        self.target_layers: tuple[LayerId, ...] = tuple(
            "norm" if slot == n_layer + 1 else slot for slot in self._native.target_slots
        )

    def _get_native(self) -> _core.SpeculativeContext:
        if self._native is None:
            raise ClosedError("the speculative context was closed")
        return self._native

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._native is None

    def close(self) -> None:
        """Free the draft's context, and the draft model if it was loaded here. Drafters made with it are
        closed too: they raise ClosedError."""
        self._native = None
        for one in self._at_close:
            if (method := one()) is not None:
                method()
        if self._owns_model:
            self.model.close()

    def __repr__(self) -> str:
        if self._native is None:
            return "SpeculativeContext(closed)"
        return f"SpeculativeContext({self.model.path.name!r}, {self.kind}, n_seq_max={self.n_seq_max})"

    @property
    def n_ctx(self) -> int:
        """Capacity of the draft's KV cache in tokens, for all sequences together."""
        return native_of(self).context.n_ctx

    @property
    def n_features(self) -> int:
        """Width of a row of features: all target_layers of a token, concatenated; 0 for a plain model."""
        return native_of(self).n_features

    @property
    def n_state(self) -> int:
        """Width of the states in pairs; 0 for a plain model."""
        return native_of(self).n_state

    @property
    def n_heads(self) -> int:
        """Number of MTP blocks that are used in turn, the k-th for the k-th token of a draft."""
        return native_of(self).n_heads

    @property
    def block_size(self) -> int | None:
        """Positions in the block of a DFlash file: the newest token, then masks, each of which gives a token;
        with DSpark the position of the newest token may give one too. None for other files."""
        return native_of(self).block_size if self.kind == "dflash" else None

    @property
    def memory(self) -> Memory:
        """The draft's KV cache, with the same operations as the target's. Blocks that attend to the target's
        KV cache (gemma4-assistant) have none to change. A drafter whose sequence is changed here drafts for
        it again only after a reset.
        """

        def native() -> _core.Context:
            return native_of(self).context

        return Memory(native, native)

    def _check_pairs(self, call: str) -> None:
        if self.kind == "dflash":
            raise UnsupportedError(
                f"{call}() is for pairs of tokens and states, which DFlash files do not have; draft with "
                "DFlashDrafter"
            )

    def encode(self, features: ArrayLike) -> NDArray[np.float32]:
        """Make the states of pairs: for EAGLE-3, the fusion of the target's features; else the same values.

        :param features: float32 ``(n, n_features)``: the target's states of :attr:`target_layers`,
            concatenated; any n. From a tap with these layers: ``tap.states.array.reshape(n, -1)``.
        :returns: float32 ``(n, n_state)``.
        :raises InvalidInputError: another shape or dtype, NaN or infinity.
        :raises UnsupportedError: the draft is a DFlash file.
        """
        self._check_pairs("encode")
        try:
            return native_of(self).encode(_float_rows("features", features))
        finally:
            flush_log()

    def decode(
        self,
        tokens: ArrayLike,
        states: ArrayLike | None,
        positions: ArrayLike,
        seqs: ArrayLike | int = 0,
        outputs: Sequence[bool] | NDArray[np.bool_] | bool = True,
        *,
        top_k: int = 1,
        logits: bool = False,
        head: int = 0,
    ) -> DraftOutput:
        """Decode pairs, which enter the draft's KV cache. Does nothing without pairs.

        :param tokens: int ``(n,)``.
        :param states: float32 ``(n, n_state)``; None for a plain model.
        :param positions: int ``(n,)``: in each sequence they continue its KV cache.
        :param seqs: int ``(n,)``, or one sequence for all.
        :param outputs: bool ``(n,)``, or one for all: which entries give results.
        :param top_k: number of tokens for each output.
        :param logits: return the logits too.
        :param head: index of the MTP block to use, if there are several.
        :raises InvalidInputError: a token, position, sequence, shape or dtype is wrong.
        :raises ContextFullError: there is no room.
        :raises UnsupportedError: the draft is a DFlash file.
        """
        core = native_of(self)
        self._check_pairs("decode")
        ids = token_array(tokens)
        n = len(ids)
        if isinstance(outputs, (bool, np.bool_)):
            outputs = [bool(outputs)] * n
        elif not isinstance(outputs, (Sequence, np.ndarray)) or isinstance(outputs, (str, bytes)):
            raise InvalidInputError(f"outputs must be a bool or a list of them, not {shown(outputs)}")
        if isinstance(seqs, (int, np.integer)):
            seqs = np.full(n, integer("seqs", seqs), np.int32)
        rows = None if states is None else _float_rows("states", states)
        try:
            return DraftOutput(
                *core.decode(
                    ids,
                    rows,
                    _integers("positions", positions),
                    _integers("seqs", seqs),
                    [flag("an output", value) for value in outputs],
                    integer("top_k", top_k),
                    flag("logits", logits),
                    integer("head", head),
                )
            )
        finally:
            flush_log()

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "weights": files_of(self.model).sampled_sha256,
            "arch": self._arch,
            **fingerprint_of(DraftContextOptions, self._used),
            "n_state": self.n_state,
            "engine": _core.build_info()["engine_commit"],
        }

    def save(self, seq: int = 0) -> bytes:
        """Save the draft's memory of a sequence, as :meth:`Context.save` does the target's."""
        state = native_of(self).context.save(integer("a sequence id", seq))
        return saved_sequences.pack(self._fingerprint(), state)

    def restore(self, seq: int, data: bytes | bytearray | memoryview) -> None:
        """Restore what :meth:`save` returned, in place of what the sequence holds.

        :raises InvalidInputError: as :meth:`Context.restore`.
        """
        native, seq = native_of(self).context, integer("a sequence id", seq)
        state = saved_sequences.unpack(self._fingerprint(), data)
        try:
            native.restore(seq, state)
        finally:
            flush_log()


def call_at_close(context: SpeculativeContext, method: Callable[[], None]) -> None:
    """Call a method when the context is closed, unless its object is gone by then: the reference is weak."""
    methods = context._at_close  # noqa: SLF001  same module
    methods[:] = [one for one in methods if one() is not None]
    methods.append(weakref.WeakMethod(method))
