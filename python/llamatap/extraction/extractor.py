"""Extractor: a model with a context that is sized to the prompts."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from numpy.typing import DTypeLike, NDArray

from llamatap._closeable import Closeable
from llamatap._native import native_of
from llamatap._options import given_options
from llamatap._validate import instance
from llamatap.context import Context
from llamatap.context_options import ContextOptions
from llamatap.errors import BusyError, ContextFullError, UnsupportedError
from llamatap.extraction.compute import compute, needs_all_outputs
from llamatap.extraction.inputs import Input, Window
from llamatap.extraction.packing import batch_sequence_limit
from llamatap.extraction.request import ExtractionRequest, Pooling
from llamatap.layers import LayerId
from llamatap.loaded_model import LoadedModel
from llamatap.states import States

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Extractor"]


class Extractor(Closeable):
    """Extraction with context options of your choice, in a context that is sized to the prompts.

    :param model: the model.
    :param options: those of :class:`llamatap.Context`, e.g. ``type_k="f32"`` or ``flash_attn=False``.
        If ``n_ctx``, ``n_seq_max`` or ``n_outputs_max`` are not given, each call sizes them to its prompts;
        the context is kept, and replaced only when it is too small.

    >>> extractor = Extractor(model, n_ubatch=256)                      # doctest: +SKIP
    >>> states = extractor(["first prompt", "second"], layers=[-2])     # doctest: +SKIP
    """

    def __init__(self, model: LoadedModel, **options: Unpack[ContextOptions]) -> None:
        instance("model", model, LoadedModel, "Model")
        given_options(ContextOptions, options, "Extractor()")
        self.model = model
        self._options = options
        self._context: Context | None = None
        self._has_outputs = False
        self._lock = threading.Lock()
        self._extracting: int | None = None  # id of the extracting thread
        self._process = os.getpid()

    def close(self) -> None:
        """Free the context; waits for a call in another thread.

        :raises BusyError: called while this thread is extracting (in a signal or log handler).
        """
        if self._process != os.getpid():
            # In a forked child, the thread that held the lock is gone.
            self._drop()
            return
        if self._extracting == threading.get_ident():
            raise BusyError("this thread is extracting; close the extractor afterwards")
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._context is not None:
            self._context.close()
            self._context = None

    def _fit(self, request: ExtractionRequest, lengths: Sequence[int]) -> Context:
        """The kept context if it fits these prompts, else a new one."""
        layer_map = self.model.layer_map
        outputs = needs_all_outputs(self.model, request.slots)
        options = self._options.copy()
        most = batch_sequence_limit(native_of(self.model)) if options.get("kv_unified", True) else 1
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
            old_room = native_of(old).n_ctx_seq
            grows = old_room < n_ctx and "n_ctx" not in options
            grows = grows or (layer_map.at_once and old.n_ubatch < min(n_ubatch, longest))
            splits = old.n_seq_max < n_seq and "n_seq_max" not in options
            same_rope = self._is_short(old_room) == self._is_short(n_ctx) or "n_ctx" in options
            if not grows and not splits and same_rope and (self._has_outputs or not outputs):
                return old
            if same_rope:
                n_ctx = max(n_ctx, old_room)
            n_seq = max(n_seq, old.n_seq_max)
            outputs = outputs or self._has_outputs
            self._drop()
        options.setdefault("n_seq_max", n_seq)
        # Without a unified cache, each sequence has its own share.
        shares = 1 if options.get("kv_unified", True) else options["n_seq_max"]
        options.setdefault("n_ctx", n_ctx * shares)
        if not outputs:
            # The output head is never computed, so its buffers can be small.
            options.setdefault("n_outputs_max", options["n_seq_max"])
        self._context = Context(self.model, **options)
        self._has_outputs = outputs
        return self._context

    def _check_length(self, longest: int) -> None:
        given = self._options.get("n_ctx")
        limit = given or self.model.n_ctx_train
        if longest > limit > 0:
            where = f"n_ctx={limit}" if given else f"the {limit} that the model was trained for"
            raise ContextFullError(
                f"a prompt of {longest} tokens is longer than {where}; cut it with max_length, or extract "
                f"with lt.Extractor(model, n_ctx={longest})"
            )

    @functools.cached_property
    def _rope_limit(self) -> int:
        """The longest context, in tokens, in which LongRoPE scales by its short factors."""
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
        request = ExtractionRequest(
            self.model, inputs, layers, dtype, max_length, window, pool, out, cancelled
        )
        return self.run(request)

    def run(self, request: ExtractionRequest) -> States | list[States]:
        """The states of a request of this extractor's model."""
        if self._process != os.getpid():
            raise UnsupportedError("the model was loaded before a fork; load it in this process")
        if not self._lock.acquire(blocking=False):
            raise BusyError(
                "another thread is extracting with this model; give each thread its own Extractor"
            )
        try:
            self._extracting = threading.get_ident()
            self._check_length(request.longest_prompt)
            done: dict[int, States] = {}
            # A prompt's states must not depend on the lengths of the others.
            for short in (True, False):
                some = [i for i, job in enumerate(request.jobs) if self._is_short(len(job.prompt)) == short]
                if some:
                    lengths = [len(request.jobs[i].prompt) for i in some]
                    done |= compute(request, self._fit(request, lengths), some)
        finally:
            self._extracting = None
            self._lock.release()
        return request.result(done)
