"""Extraction: hidden states of whole prompts. Nothing is computed beyond the last wanted layer."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap import layers as layer_ids
from llamatap._closeable import Closeable
from llamatap._native import _core, flush_log
from llamatap._system_limits import require_memory
from llamatap._validate import instance, integer, separate, shown
from llamatap.context import Context, ContextOptions
from llamatap.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    ContextFullError,
    InvalidInputError,
    UnsupportedError,
)
from llamatap.extraction.inputs import Input, Window, bounds, cut_prompt, is_single, out_array
from llamatap.extraction.packing import most_sequences, packs
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.states import DTYPES, States, dtype_name, typed_view

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Extractor", "Input", "Pooling", "Window", "extract"]

Pooling = Literal["mean", "last", "max"]


@dataclass
class _Job:
    """One prompt of a call: its window of positions and its output array."""

    tokens: NDArray[np.int32]
    n_prompt: int  # with what max_length cut
    begin: int
    end: int
    shape: tuple[int, ...]
    given: NDArray[Any] | None  # by the caller, for the states
    out: NDArray[Any] = field(init=False)


class _Run:
    """One call of extract: arguments checked, outputs ready, prompts not yet computed."""

    def __init__(
        self,
        model: Model,
        inputs: Input | Sequence[Input],
        layers: Iterable[LayerId] | LayerId,
        dtype: DTypeLike | str | None,
        max_length: int | None,
        window: Window | Sequence[Window | None] | None,
        pool: Pooling | None,
        out: NDArray[Any] | Sequence[NDArray[Any]] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        if cancelled is not None and not callable(cancelled):
            raise InvalidInputError(f"cancelled must be a function, not {type(cancelled).__name__}")
        self.cancelled = cancelled
        if model.n_layer == 0:
            model.layer_map  # noqa: B018  without weights there are no blocks either: raises
        self.n_layer = model.n_layer
        self.layers = layer_ids.normalize(layers, self.n_layer)
        self.slots = layer_ids.slots(self.layers, self.n_layer)
        if pool is not None and (not isinstance(pool, str) or pool not in ("mean", "last", "max")):
            raise InvalidInputError(f"pool must be 'mean', 'last' or 'max', not {shown(pool)}")
        self.pool = pool
        self.max_length = None if max_length is None else integer("max_length", max_length, 1)
        self.single = is_single(inputs)
        prompts: Sequence[Any] = [inputs] if self.single else inputs  # type: ignore[assignment]
        self.dtype = None if dtype is None else dtype_name(dtype)
        outs = self._one_each("out", out, len(prompts), isinstance(out, np.ndarray))
        windows = self._one_each("window", window, len(prompts), isinstance(window, tuple))
        if self.dtype is None:
            first = next((o for o in outs if isinstance(o, np.ndarray)), None)
            self.dtype = "float32" if first is None else dtype_name(first.dtype, "the dtype of out")

        self.jobs: list[_Job] = []
        for index, prompt in enumerate(prompts):
            where = "" if self.single else f"input {index}: "
            try:
                self.jobs.append(self._job(model, prompt, windows[index], outs[index]))
            except InvalidInputError as error:
                raise InvalidInputError(f"{where}{error}") from None
        separate("outs", [(i, job.given) for i, job in enumerate(self.jobs) if job.given is not None])
        self._make_room()

    def _one_each(self, name: str, value: Any, count: int, is_one: bool) -> list[Any]:
        if value is None:
            return [None] * count
        if is_one:
            if name == "out" and not self.single:
                raise InvalidInputError("a list of inputs takes a list of outs, one each")
            return [value] * count
        if self.single or not isinstance(value, Sequence):
            one = {"out": "a NumPy array", "window": "(start, stop)"}[name]
            many = "" if self.single else ", or a list of them, one for each input"
            raise InvalidInputError(f"{name} must be {one}{many}, not {type(value).__name__}")
        if len(value) != count:
            raise InvalidInputError(f"there are {count} inputs, but {len(value)} entries in {name}")
        return list(value)

    def _job(self, model: Model, prompt: Input, window: Window | None, out: object) -> _Job:
        tokens, n_prompt = cut_prompt(model, prompt, self.max_length)
        begin, end = bounds(window, len(tokens))
        rows = () if self.pool is not None else (end - begin,)
        shape = (*rows, len(self.layers), model.n_embd)
        assert self.dtype is not None
        given = None if out is None else out_array(out, shape, self.dtype)
        return _Job(tokens, n_prompt, begin, end, shape, given)

    def _make_room(self) -> None:
        """Allocate the states of the prompts for which no array was given."""
        assert self.dtype is not None
        shapes = [job.shape for job in self.jobs if job.given is None]
        n_rows = sum(shape[0] if len(shape) == 3 else 1 for shape in shapes)
        require_memory(
            sum(map(math.prod, shapes)) * DTYPES[self.dtype].itemsize,
            f"the states ({n_rows:,} rows of {len(self.layers)} layers, {self.dtype}) take",
            "ask for fewer layers or prompts, a window, a pool or float16, or give a memmap as out",
        )
        for job in self.jobs:
            if job.given is None:
                job.out = typed_view(_core.allocate(job.shape, self.dtype), self.dtype)
            else:
                job.out = job.given

    def compute(self, context: Context, indices: Sequence[int]) -> dict[int, States]:
        """Compute some of the prompts in one context."""
        most = context.n_seq_max if context.kv_unified else 1
        room = min(context.n_ubatch, context.n_ctx)
        try:
            for pack in packs([len(self.jobs[i].tokens) for i in indices], room, most):
                together = [self.jobs[indices[k]] for k in pack]
                if not self._capture(context, together) and len(together) > 1:
                    # NaN or infinity of one prompt may have reached the others of the batch.
                    for job in together:
                        self._capture(context, [job])
        finally:
            flush_log()
        return {i: self._states(context, self.jobs[i]) for i in indices}

    def _capture(self, context: Context, jobs: Sequence[_Job]) -> bool:
        """Compute prompts in one batch. Returns whether all captured values are finite."""
        assert self.dtype is not None
        if _passes_last_block(context.model, self.slots):
            n_rows = min(sum(len(job.tokens) for job in jobs), context.n_ubatch)
            context.require_outputs(n_rows, computed=False)
        if self.cancelled is not None and self.cancelled():
            raise CancelledError("cancelled before the engine was asked")
        return context.native.extract(
            context.model.layer_map,
            self.slots,
            self.dtype,
            [
                (job.tokens, job.begin, job.end, self.pool or "none", job.out.reshape(-1).view(np.uint8))
                for job in jobs
            ],
            self.cancelled,
        )

    def _states(self, context: Context, job: _Job) -> States:
        array = job.out.view()
        array.flags.writeable = False
        return States(
            array,
            job.tokens[job.begin : job.end],
            self.layers,
            n_layer=self.n_layer,
            source=context.source,
            details={
                "window": [job.begin, job.end],
                "pooling": self.pool,
                "max_length": self.max_length,
                "prompt_tokens": job.n_prompt,
                "truncated": job.n_prompt > len(job.tokens),
            },
        )


def _passes_last_block(model: Model, slots: Sequence[int]) -> bool:
    """Whether all rows must be outputs of the engine for these layers."""
    nodes = model.layer_map.nodes
    # Without a memory a whole prompt is computed at once, and all of it is output.
    return any(nodes[slot][1] for slot in slots) or not model.layer_map.has_memory


class Extractor(Closeable):
    """Extraction with chosen context options: a model and a context sized to the work.

    :param model: the model.
    :param options: those of :class:`llamatap.Context`, e.g. ``type_k="f32"`` or ``flash_attn=False``.
        Where ``n_ctx``, ``n_seq_max`` or ``n_outputs_max`` are not given, they are sized to the work of
        each call; the context is kept and made anew only when it is too small.

    >>> extractor = Extractor(model, n_ubatch=256)                      # doctest: +SKIP
    >>> states = extractor(["first prompt", "second"], layers=[-2])     # doctest: +SKIP
    """

    def __init__(self, model: Model, **options: Unpack[ContextOptions]) -> None:
        instance("model", model, Model)
        for name, value in options.items():
            if name not in ContextOptions.__annotations__:
                raise TypeError(f"Extractor() got an unexpected keyword argument {name!r}")
            if name in ("n_ctx", "n_ubatch", "n_seq_max"):
                integer(name, value)
        self.model = model
        self._options = options
        self._context: Context | None = None
        self._has_outputs = False
        self._lock = threading.Lock()
        self._thread: int | None = None  # that is extracting
        self._process = os.getpid()

    def close(self) -> None:
        """Free the context; waits for a call in another thread.

        :raises BusyError: this thread is extracting (a signal handler or a log handler calls).
        """
        if self._process != os.getpid():
            # In a forked child the thread that held the lock is gone.
            self._drop()
            return
        if self._thread == threading.get_ident():
            raise BusyError("this thread is extracting; close afterwards")
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    def _fit(self, run: _Run, lengths: Sequence[int]) -> Context:
        """The kept context when it suits this work, else a new one."""
        layer_map = self.model.layer_map
        outputs = _passes_last_block(self.model, run.slots)
        options = self._options.copy()
        most = most_sequences(self.model.native) if options.get("kv_unified", True) else 1
        n_seq = 1
        while n_seq < min(len(lengths), most):
            n_seq *= 2
        longest = max(lengths)
        n_ubatch = options.setdefault("n_ubatch", max(512, longest) if layer_map.at_once else 512)
        if layer_map.at_once:
            options.setdefault("n_batch", n_ubatch)
        n_ctx = max(longest, min(n_ubatch, self._rope_limit) if self._is_short(longest) else n_ubatch)
        old = self._context
        if old is not None and not old.closed:
            grows = old.native.n_ctx_seq < n_ctx and "n_ctx" not in options
            grows = grows or (layer_map.at_once and old.n_ubatch < min(n_ubatch, longest))
            splits = old.n_seq_max < n_seq and "n_seq_max" not in options
            same_rope = self._is_short(old.native.n_ctx_seq) == self._is_short(n_ctx) or "n_ctx" in options
            if not grows and not splits and same_rope and (self._has_outputs or not outputs):
                return old
            if same_rope:
                n_ctx = max(n_ctx, old.native.n_ctx_seq)
            n_seq = max(n_seq, old.n_seq_max)
            outputs = outputs or self._has_outputs
            self._drop()
        options.setdefault("n_seq_max", n_seq)
        # Without a unified cache each sequence has a share of its own.
        shares = 1 if options.get("kv_unified", True) else options["n_seq_max"]
        options.setdefault("n_ctx", n_ctx * shares)
        if not outputs:
            # No output head is ever computed: its buffers can be small.
            options.setdefault("n_outputs_max", options["n_seq_max"])
        self._context = Context(self.model, **options)
        self._has_outputs = outputs
        return self._context

    @functools.cached_property
    def _rope_limit(self) -> int:
        """Models with LongRoPE compute otherwise in contexts longer than this many tokens."""
        key = f"{self.model.arch}.rope.scaling.original_context_length"
        return int(self.model.metadata.get(key, 2**31 - 1))

    def _is_short(self, n_tokens: int) -> bool:
        return n_tokens <= self._rope_limit

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self,
        inputs: Input,
        layers: Iterable[LayerId] | LayerId = ...,
        *,
        dtype: DTypeLike | str | None = ...,
        max_length: int | None = ...,
        window: Window | None = ...,
        pool: Pooling | None = ...,
        out: NDArray[Any] | None = ...,
        cancelled: Callable[[], bool] | None = ...,
    ) -> States: ...

    @overload
    def __call__(
        self,
        inputs: Sequence[Input],
        layers: Iterable[LayerId] | LayerId = ...,
        *,
        dtype: DTypeLike | str | None = ...,
        max_length: int | None = ...,
        window: Window | Sequence[Window | None] | None = ...,
        pool: Pooling | None = ...,
        out: Sequence[NDArray[Any]] | None = ...,
        cancelled: Callable[[], bool] | None = ...,
    ) -> list[States]: ...

    def __call__(
        self,
        inputs: Input | Sequence[Input],
        layers: Iterable[LayerId] | LayerId = (-2,),
        *,
        dtype: DTypeLike | str | None = None,
        max_length: int | None = None,
        window: Window | Sequence[Window | None] | None = None,
        pool: Pooling | None = None,
        out: NDArray[Any] | Sequence[NDArray[Any]] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> States | list[States]:
        """See :func:`llamatap.extract`."""
        try:
            run = _Run(self.model, inputs, layers, dtype, max_length, window, pool, out, cancelled)
        except ReferenceError:
            raise ClosedError("the model that this extractor belongs to is gone") from None
        return self._extract(run)

    def _extract(self, run: _Run) -> States | list[States]:
        if self._process != os.getpid():
            raise UnsupportedError("the model was loaded before a fork; load it in this process")
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another thread is extracting with this model; give each thread an Extractor of its own"
            )
        try:
            self._thread = threading.get_ident()
            longest = max(len(job.tokens) for job in run.jobs)
            limit = self._options.get("n_ctx") or self.model.n_ctx_train
            if longest > limit > 0:
                raise ContextFullError(
                    f"a prompt of {longest} tokens is longer than the {limit} that the model was "
                    "trained for or n_ctx allows; cut it with max_length, or give n_ctx"
                )
            done: dict[int, States] = {}
            # A prompt's states must not depend on how long the others of the call are.
            for short in (True, False):
                some = [i for i, job in enumerate(run.jobs) if self._is_short(len(job.tokens)) == short]
                if some:
                    lengths = [len(run.jobs[i].tokens) for i in some]
                    done |= run.compute(self._fit(run, lengths), some)
        finally:
            self._thread = None
            self._lock.release()
        states = [done[i] for i in range(len(run.jobs))]
        return states[0] if run.single else states


@overload
def extract(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
    model_or_context: Model | Context,
    inputs: Input,
    layers: Iterable[LayerId] | LayerId = ...,
    *,
    dtype: DTypeLike | str | None = ...,
    max_length: int | None = ...,
    window: Window | None = ...,
    pool: Pooling | None = ...,
    out: NDArray[Any] | None = ...,
    cancelled: Callable[[], bool] | None = ...,
) -> States: ...


@overload
def extract(
    model_or_context: Model | Context,
    inputs: Sequence[Input],
    layers: Iterable[LayerId] | LayerId = ...,
    *,
    dtype: DTypeLike | str | None = ...,
    max_length: int | None = ...,
    window: Window | Sequence[Window | None] | None = ...,
    pool: Pooling | None = ...,
    out: Sequence[NDArray[Any]] | None = ...,
    cancelled: Callable[[], bool] | None = ...,
) -> list[States]: ...


def extract(
    model_or_context: Model | Context,
    inputs: Input | Sequence[Input],
    layers: Iterable[LayerId] | LayerId = (-2,),
    *,
    dtype: DTypeLike | str | None = None,
    max_length: int | None = None,
    window: Window | Sequence[Window | None] | None = None,
    pool: Pooling | None = None,
    out: NDArray[Any] | Sequence[NDArray[Any]] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> States | list[States]:
    """The hidden states of prompts at the layers asked for.

    :param model_or_context: a Model brings a context of its own, sized to the work and kept for the next
        call. A Context must be empty, and is empty afterwards.
    :param inputs: a text, token ids, or a list of either; a list gives a list. Texts are tokenised with
        special tokens added and recognised.
    :param layers: ids 0..n, negative from the end (-1 is H_n, pre-norm; -2 is what enters the last
        block), ``"norm"`` for norm(H_n); any subset, in any order, repeats kept. :mod:`llamatap.layers` says
        what they are in a post-norm encoder (BERT), which has no ``"norm"``.
    :param dtype: float32 (unless said here or given by ``out``), float16 or bfloat16; converted while
        copying, to nearest even.
    :param max_length: cut prompts on the right to this many tokens. A text keeps the EOS that the tokenizer
        adds.
    :param window: positions [start, stop) that are wanted, as of a slice; one, or one for each input.
        What lies outside takes no memory.
    :param pool: "mean", "last" or "max" over the window instead of a row a token; raw otherwise, and
        never normalised.
    :param out: a C-contiguous array (or memmap) to write into, ``(n_tokens, n_layers, n_embd)``, or
        ``(n_layers, n_embd)`` with ``pool``; a list of them for a list of inputs.
    :param cancelled: is asked before each batch and about every 50 ms while the engine works, from the
        calling thread; once it says True the work ends, on a GPU with the pass of ``n_ubatch`` tokens that
        is under way. ``threading.Event().is_set`` is one.
    :returns: :class:`llamatap.States`, or a list of them, in the order of the inputs.
    :raises InvalidInputError: an argument is wrong; nothing was computed.
    :raises ContextFullError: a prompt is too long; with both numbers.
    :raises OutOfMemoryError: the states, or the context for them, do not fit into memory; with both numbers.
        Nothing was allocated.
    :raises UnsupportedError: the model carries no single residual stream, or is no language model or
        encoder of its own (encoder-decoders, drafters), or ``"norm"`` is asked of one that has none.
    :raises BusyError: another thread uses the context.
    :raises ClosedError: the model or the context was closed.
    :raises CancelledError: ``cancelled`` said so. What ``out`` holds then is of no use; the context is as it
        was before.

    Nothing after the last wanted layer is computed, the output head included. Many short prompts share
    batches. Runs without the GIL; Ctrl-C ends it.
    """
    if not isinstance(model_or_context, (Model, Context)):
        raise InvalidInputError(f"expected a Model or a Context, found {type(model_or_context).__name__}")
    model = model_or_context if isinstance(model_or_context, Model) else model_or_context.model
    run = _Run(model, inputs, layers, dtype, max_length, window, pool, out, cancelled)
    if isinstance(model_or_context, Model):
        return model.extractor._extract(run)
    longest = max(len(job.tokens) for job in run.jobs)
    room = model_or_context.native.n_ctx_seq
    if longest > room:
        raise ContextFullError(
            f"a prompt of {longest} tokens does not fit into a context of {room} a sequence (n_ctx); cut it "
            "with max_length, or make a larger context"
        )
    done = run.compute(model_or_context, range(len(run.jobs)))
    states = [done[i] for i in range(len(run.jobs))]
    return states[0] if run.single else states
