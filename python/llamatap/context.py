"""Contexts: a model with memory, decoding batches, tapped or not."""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Protocol, TypedDict

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap import _system_limits
from llamatap import layers as layer_ids
from llamatap._closeable import Closeable
from llamatap._native import _core, default_threads, flush_log, usable_cpus, within_quota
from llamatap._validate import NotCopied, flag, instance, integer, shown
from llamatap.errors import BusyError, ClosedError, InvalidInputError
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.states import DTYPES, Source, States, dtype_name, typed_view
from llamatap.storage import saved_sequences

__all__ = ["Batch", "Context", "ContextOptions", "Memory", "Tap"]

Batch = _core.Batch


class ContextOptions(TypedDict, total=False):
    """The keyword arguments of :class:`Context`."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_threads: int | None
    type_k: str
    type_v: str
    flash_attn: bool | None
    kv_unified: bool
    swa_full: bool
    n_rs_seq: int
    n_outputs_max: int


def _cache_type(name: str, value: str) -> str:
    instance(name, value, str)
    return value


class _HoldsContext(Protocol):
    @property
    def native(self) -> _core.Context: ...


class Memory(NotCopied):
    """The memory of a context: the KV cache, or the state of recurrent models, of each sequence.

    Ranges of positions are half-open, ``[p0, p1)``; None stands for the start and for the end.

    While :func:`llamatap.generate` runs in the context, or a :class:`llamatap.Session` holds it, calls that
    change the memory raise BusyError.
    """

    def __init__(self, context: _HoldsContext) -> None:
        self._context = context

    @property
    def _changing(self) -> _core.Context:
        context = self._context
        return context._writable if isinstance(context, Context) else context.native

    def clear(self) -> None:
        """Forget all sequences, and set the whole cache to zero."""
        self._changing.memory_clear()

    def remove(self, seq: int, p0: int | None = None, p1: int | None = None) -> None:
        """Forget the positions ``[p0, p1)`` of a sequence. Once no sequence is left, the cache is set to
        zero; until then, NaN that a removed sequence left in it can reach others.

        :param p0: None for the beginning.
        :param p1: None for the end.
        :raises InvalidInputError: no such sequence id, or positions that are no range.
        :raises UnsupportedError: the memory cannot forget a part: a recurrent model's, or a sliding
            window's without ``swa_full``.
        """
        self._changing.memory_remove(_sequence(seq), _position(p0), _position(p1))

    def copy(self, source: int, target: int, p0: int | None = None, p1: int | None = None) -> None:
        """Give ``target`` the positions ``[p0, p1)`` of ``source`` too, replacing what it holds there; a
        whole sequence replaces all that it holds.

        :raises InvalidInputError: no such sequence id, or positions that are no range.
        :raises UnsupportedError: a part of a sequence, where only a whole one can be copied; or a part
            without what its sliding windows reach back to.
        """
        self._changing.memory_copy(_sequence(source), _sequence(target), _position(p0), _position(p1))

    def keep(self, seq: int) -> None:
        """Forget all sequences but one.

        :raises InvalidInputError: no such sequence id.
        """
        self._changing.memory_keep(_sequence(seq))

    def shift(self, seq: int, p0: int | None, p1: int | None, delta: int) -> None:
        """Move the positions ``[p0, p1)`` of a sequence by ``delta``. What it shares with others
        (:meth:`copy`, batches of several sequences) moves in them too.

        :raises InvalidInputError: no such sequence id, or positions that are no range; or two tokens of a
            sequence, of this one or of one that shares some, would come to one position.
        :raises UnsupportedError: the model's positions cannot be moved; a recurrent model's only in whole
            sequences that share nothing.
        """
        self._changing.memory_shift(_sequence(seq), _position(p0), _position(p1), integer("delta", delta))

    def first(self, seq: int) -> int:
        """The first position of a sequence in memory; -1 when there is none.

        :raises InvalidInputError: no such sequence id.
        """
        return self._context.native.memory_first(_sequence(seq))

    def last(self, seq: int) -> int:
        """The last position of a sequence in memory; -1 when there is none.

        :raises InvalidInputError: no such sequence id.
        """
        return self._context.native.memory_last(_sequence(seq))


def thread_count(n_threads: int | None) -> int:
    """`n_threads` checked, with a warning of too many; None: :func:`llamatap._native.default_threads`."""
    threads = default_threads() if n_threads is None else integer("n_threads", n_threads, 1)
    n_cpus = len(usable_cpus())
    usable = within_quota(n_cpus)
    if 512 >= threads > usable:
        limit = f"{n_cpus} CPUs" if usable == n_cpus else f"{usable} CPUs' worth of time (its CPU quota)"
        warnings.warn(
            f"n_threads={threads} is more than the {limit} of this process: the threads wait for each other "
            "some hundred times a decode, and generating text takes up to three times as long",
            RuntimeWarning,
            stacklevel=4,
        )
    return threads


def _position(position: int | None) -> int:
    if position is None:
        return -1
    return integer("a position", position, 0)


def _sequence(seq: int) -> int:
    return integer("a sequence id", seq)


class Tap(NotCopied):
    """Captures the states of each decode of a context while a ``with`` block has it open; see
    :meth:`Context.tap`. It may be opened again later. One that was entered without ``with`` is closed when
    the last reference to it goes."""

    def __init__(
        self, context: Context, layers: tuple[LayerId, ...], rows: Literal["all", "outputs"], dtype: str
    ) -> None:
        self.layers = layers
        self.rows = rows
        self.dtype = dtype
        self._context = context
        self._last: States | None = None
        self._entered = False

    def __enter__(self) -> Tap:
        self._context.native  # noqa: B018  a closed context is told now rather than at the first decode
        if self._context._tap is not None:
            raise InvalidInputError("a tap is open on this context already; ask it for all layers")
        self._last = None
        self._entered = True
        self._context._open_tap = weakref.ref(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._context._tap is self:
            self._context._open_tap = None

    @property
    def states(self) -> States:
        """The states of the last decode, rows in the order of the batch; with ``rows="outputs"``, of its
        outputs alone. Arrays of earlier decodes stay valid.

        :raises InvalidInputError: nothing was decoded yet.
        """
        if self._last is None:
            if not self._entered:
                raise InvalidInputError(
                    "the tap was never opened; decode within `with context.tap(...) as tap:`"
                )
            raise InvalidInputError("nothing was decoded since the tap was opened")
        return self._last


class Context(Closeable):
    """A model with memory of its sequences. One thread at a time: a second one gets BusyError.

    :param model: kept alive by the context.
    :param n_ctx: tokens that fit, of all sequences together; 0 for what the model was trained with. The
        engine rounds up to 256; :attr:`n_ctx` tells.
    :param n_batch: the most tokens of one engine call, at least n_seq_max; larger batches take several.
    :param n_ubatch: the most tokens computed at once.
    :param n_seq_max: sequence ids are 0..n_seq_max-1.
    :param n_threads: None for the number of physical cores, or what the CPU quota of a container pays for
        where that is less; more than there are CPUs, or than the quota, gets a RuntimeWarning.
    :param type_k: type of the K cache: f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1.
    :param type_v: type of the V cache.
    :param flash_attn: None leaves it to the engine.
    :param kv_unified: one cache for all sequences; False gives each its own n_ctx / n_seq_max tokens.
    :param swa_full: keep all positions of sliding-window layers, so that suffixes can be removed.
    :param n_rs_seq: how many tokens a recurrent or hybrid model can take back, where it does so exactly.
    :param n_outputs_max: the most outputs of one engine call, at least n_seq_max; 0 for n_batch. A small
        number saves memory in proportion to the vocabulary.
    :raises InvalidInputError: an option is out of range.
    :raises UnsupportedError: the engine cannot make such a context of this model.
    :raises OutOfMemoryError: it does not fit into memory; with both numbers and the largest ``n_ctx`` that
        does. Counted are the KV cache, recurrent states, compute buffers, and outputs: ``n_outputs_max`` of
        them where that was given, else one a sequence.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        n_threads: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: bool | None = None,
        kv_unified: bool = True,
        swa_full: bool = True,
        n_rs_seq: int = 0,
        n_outputs_max: int = 0,
    ) -> None:
        self._native: _core.Context | None = None
        # Weak: a tap is closed when its last reference goes.
        self._open_tap: weakref.ref[Tap] | None = None
        self._generation: weakref.ref[object] | None = None
        self.lock = threading.Lock()
        instance("model", model, Model)
        self.model = model
        self.type_k = _cache_type("type_k", type_k)
        self.type_v = _cache_type("type_v", type_v)
        self.kv_unified = flag("kv_unified", kv_unified)
        self.swa_full = flag("swa_full", swa_full)
        self.n_seq_max = integer("n_seq_max", n_seq_max, 1)
        self.n_rs_seq = integer("n_rs_seq", n_rs_seq, 0)
        self.n_outputs_max = integer("n_outputs_max", n_outputs_max, 0)
        self.n_threads = thread_count(n_threads)
        # The model's own object may be closed before this one is.
        self._loaded = model.native
        # Room for outputs that the engine has, or that was found to be there.
        self._outputs_bytes = max(self.n_seq_max * self._loaded.n_vocab * 4, 32 << 20)
        self._n_layer = model.n_layer
        try:
            self._native = _core.Context(
                self._loaded,
                n_ctx=integer("n_ctx", n_ctx, 0),
                n_batch=integer("n_batch", n_batch, 1),
                n_ubatch=integer("n_ubatch", n_ubatch, 1),
                n_seq_max=self.n_seq_max,
                n_rs_seq=self.n_rs_seq,
                n_outputs_max=self.n_outputs_max,
                n_threads=self.n_threads,
                type_k=type_k,
                type_v=type_v,
                flash_attention=-1 if flash_attn is None else int(flag("flash_attn", flash_attn)),
                kv_unified=self.kv_unified,
                swa_full=self.swa_full,
                memory_available=_system_limits.available_memory(),
            )
        finally:
            flush_log()
        self.source = Source(
            model.files,
            {
                "arch": model.arch,
                "file_type": model.file_type,
                **({} if self.model.weights is None else {"weights": self.model.weights}),
                "n_layer": model.n_layer,
                "n_embd": model.n_embd,
                "engine_commit": _core.build_info()["engine_commit"],
                "llamatap_version": _core.build_info()["version"],
                "backend": ", ".join(model.devices) or "CPU",
                "type_k": type_k,
                "type_v": type_v,
                "flash_attention": self.flash_attn,
            },
        )

    @property
    def native(self) -> _core.Context:
        """The core's object. Private to the package.

        :raises ClosedError: the context was closed.
        """
        if self._native is None:
            raise ClosedError("the context was closed")
        return self._native

    @property
    def generation(self) -> object | None:
        """The running generation, which has the memory for itself; None once no reference to it is left.
        Private to the package."""
        return None if self._generation is None else self._generation()

    @generation.setter
    def generation(self, user: object | None) -> None:
        self._generation = None if user is None else weakref.ref(user)

    @property
    def _writable(self) -> _core.Context:
        """The core's object, for calls that change its memory.

        :raises BusyError: a generation is going on.
        """
        native = self.native
        if self.generation is not None:
            raise BusyError(
                "a generation is going on in this context and has its memory for itself; it must end first "
                "(exhaust or close() what generate() gave, or close the Session)"
            )
        return native

    @functools.cached_property
    def _layer_map(self) -> _core.LayerMap:
        try:
            return self.model.layer_map
        except ClosedError:
            return _core.LayerMap.resolve(self._loaded)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._native is None

    def close(self) -> None:
        """Free the context. Arrays that were captured stay valid."""
        self._native = None

    def __repr__(self) -> str:
        if self._native is None:
            return "Context(closed)"
        return f"Context({self.model.path.name!r}, n_ctx={self.n_ctx}, n_seq_max={self.n_seq_max})"

    @property
    def memory(self) -> Memory:
        """The context's memory of its sequences."""
        return Memory(self)

    @property
    def n_ctx(self) -> int:
        """Tokens that fit, of all sequences together."""
        return self.native.n_ctx

    @property
    def n_batch(self) -> int:
        """The most tokens of one engine call."""
        return self.native.n_batch

    @property
    def n_ubatch(self) -> int:
        """The most tokens computed at once."""
        return self.native.n_ubatch

    @property
    def flash_attn(self) -> bool:
        """Whether flash attention is in use."""
        return self.native.flash_attention

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
        self._writable  # noqa: B018  raises while a generation is going on
        instance("batch", batch, Batch)
        self._decode(batch)

    def require_outputs(self, n_outputs: int, *, computed: bool = True) -> None:
        """Refuse outputs whose logits do not fit into memory: the engine allocates them when it decodes.
        Private to the package.

        :param computed: whether the decode goes on to the logits; the engine makes room for them either way.
        :raises OutOfMemoryError: with both numbers.
        """
        rows = n_outputs + (min(n_outputs, self.n_ubatch) if computed else 0)
        needed = rows * self._loaded.n_vocab * 4
        if needed > self._outputs_bytes:
            _system_limits.require_memory(
                needed - self._outputs_bytes,
                f"the logits of {n_outputs} outputs take",
                "flag fewer entries of a batch as outputs, or decode it in parts",
            )
            self._outputs_bytes = needed

    def _require_room(self, batch: Batch, tap: Tap | None) -> None:
        n_rows = len(batch)
        # Few rows need no look at each.
        if n_rows * self._loaded.n_vocab * 8 > self._outputs_bytes:
            self.require_outputs(sum(batch.outputs))
        if tap is not None:
            row_bytes = len(tap.layers) * self._loaded.n_embd * DTYPES[tap.dtype].itemsize
            _system_limits.require_memory(
                (n_rows if tap.rows == "all" else sum(batch.outputs)) * row_bytes,
                f"the states of a batch of {n_rows} entries ({len(tap.layers)} layers, {tap.dtype}) take",
                "tap fewer layers, or decode it in parts",
            )

    def _decode(self, batch: Batch) -> None:
        native = self.native
        tap = self._tap
        self._require_room(batch, tap)
        try:
            if tap is None:
                native.decode(batch)
                return
            tap._last = None
            array, tokens = native.decode_tapped(
                self._layer_map,
                layer_ids.slots(tap.layers, self._n_layer),
                tap.dtype,
                tap.rows == "outputs",
                batch,
            )
        finally:
            flush_log()
        tap._last = States(
            typed_view(array, tap.dtype),
            tokens,
            tap.layers,
            n_layer=self._n_layer,
            source=self.source,
            details={"rows": tap.rows},
        )

    @property
    def tapped(self) -> States | None:
        """States of the last decode from the open tap; None when no tap is open or nothing was decoded."""
        tap = self._tap
        return None if tap is None else tap._last

    @property
    def _tap(self) -> Tap | None:
        """The tap that is open."""
        return None if self._open_tap is None else self._open_tap()

    def logits(self, row: int = -1) -> NDArray[np.float32]:
        """The logits of an entry of the last batch: float32 ``(n_vocab,)``, a copy.

        :param row: which entry; negative ones count from the end of the batch.
        :raises InvalidInputError: no such entry, or it was not an output.
        :raises UnsupportedError: the model has no output head (encoders).
        """
        return self.native.logits(integer("row", row))

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
        if not isinstance(rows, str) or rows not in ("all", "outputs"):
            raise InvalidInputError(f"rows must be 'all' or 'outputs', not {shown(rows)}")
        wanted = layer_ids.normalize(layers, self._n_layer)
        self.native  # noqa: B018  raises when closed
        return Tap(self, wanted, rows, dtype_name(dtype))

    def _fingerprint(self) -> dict[str, Any]:
        model = self._loaded
        return {
            "arch": model.arch,
            "file_type": model.file_type,
            "n_layer": model.n_layer,
            "n_embd": model.n_embd,
            "weights": self.model.files.sample,
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
        return saved_sequences.pack(self._fingerprint(), self.native.save(_sequence(seq)))

    def restore(self, seq: int, data: bytes | bytearray | memoryview) -> None:
        """Bring back what :meth:`save` gave, in place of what the sequence holds.

        :raises InvalidInputError: truncated or changed data, or that of another model, cache type or
            engine; the sequence is then as it was.
        :raises BusyError: another thread uses this context, or a generation is going on in it.
        """
        native, seq = self._writable, _sequence(seq)
        state = saved_sequences.unpack(self._fingerprint(), data)
        try:
            native.restore(seq, state)
        finally:
            flush_log()
