"""Loaded models."""

from __future__ import annotations

import functools
import logging
import os
import stat
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llamatap import _system_limits
from llamatap._closeable import Closeable
from llamatap._native import _core, ensure_backends, flush_log
from llamatap._validate import flag, integer, shown
from llamatap._validate import path as checked_path
from llamatap.chat import template as templates
from llamatap.chat import unparsed_tokens
from llamatap.errors import (
    ClosedError,
    InvalidInputError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedError,
)
from llamatap.storage.model_files import ModelFiles

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamatap.context import Context, ContextOptions
    from llamatap.extraction.extractor import Extractor

__all__ = ["Model", "token_array"]

_logger = logging.getLogger("llamatap")


def token_array(tokens: ArrayLike) -> NDArray[np.int32]:
    """Token ids as int32 ``(n,)``; a copy unless they are that already.

    :raises InvalidInputError: not integers, not one-dimensional, or beyond 32 bits.
    """
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise InvalidInputError(f"token ids must be a flat sequence of integers: {error}") from None
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidInputError(
            f"token ids must be a one-dimensional sequence of integers, not {array.dtype} of "
            f"shape {array.shape}"
        )
    if array.dtype != np.int32:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high > np.iinfo(np.int32).max:
            raise InvalidInputError(f"token ids must be in 0..2**31-1; found {low}..{high}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidInputError(f"expected a str, found {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the text is not valid Unicode: {error}") from error


class Model(Closeable):
    """A model loaded from a GGUF file.

    :param path: the file (of a split model: the first one).
    :param n_gpu_layers: how many layers to put on the GPU; -1 for all. 0 uses no GPU at all.
    :param use_mmap: map the file instead of reading it.
    :param load_mtp: load the model's own multi-token-prediction blocks too.
    :param vocab_only: load the tokenizer and the metadata alone.
    :param weights: ``"f32"``, ``"f16"`` or ``"bf16"``: what weights that are not float32 are converted to,
        rounded to nearest, before they are loaded; for CPUs that are slow with the file's type (Q4_1). They
        take that type's bytes, in memory, and ``use_mmap`` has no effect. The engine rounds what it
        multiplies with weights to 8 bits for quantised ones, 11 for float16, 8 for bfloat16, and not at all
        for float32: with ``"f32"`` the states are those of the file's weights, exact to float32.
    :param progress: called with the fraction loaded, in 0..1, about every 50 ms.
    :raises InvalidInputError: an argument is wrong, or a weight is beyond float16 with ``weights="f16"``.
    :raises ModelNotFoundError: there is no such file.
    :raises ModelLoadError: the file cannot be loaded; with what the engine said.
    :raises OutOfMemoryError: the weights do not fit into memory. Those of a mapped file need not, for pages
        can be dropped and read again at each pass: the logger ``llamatap`` warns of it. (Weights that the CPU
        keeps in an order of its own, mostly those of 4 bits, are copies and must fit.)

    A model can be shared by contexts in several threads. ``close()``, or leaving a ``with`` block, gives
    up its memory once its contexts are closed too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        use_mmap: bool = True,
        load_mtp: bool = False,
        vocab_only: bool = False,
        weights: Literal["f32", "f16", "bf16"] | None = None,
        progress: Callable[[float], object] | None = None,
    ) -> None:
        # Set first: __repr__ and close() work on a model that failed to load.
        self._native: _core.Model | None = None
        self._extractor: Extractor | None = None
        self._unparsed: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        self.path = checked_path("path", path)
        if progress is not None and not callable(progress):
            raise InvalidInputError(f"progress must be callable, not {type(progress).__name__}")
        if weights is not None and not (isinstance(weights, str) and weights in ("f32", "f16", "bf16")):
            raise InvalidInputError(f"weights must be 'f32', 'f16', 'bf16' or None, not {shown(weights)}")
        if weights is not None and flag("vocab_only", vocab_only):
            raise InvalidInputError("weights are not loaded with vocab_only=True; leave out weights=")
        #: The type that weights were converted to; None: they are as in the file.
        self.weights = weights
        try:
            status = self.path.stat()
        except FileNotFoundError:
            raise ModelNotFoundError(f"no such file: {self.path}") from None
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {self.path}: {error}") from error
        if stat.S_ISDIR(status.st_mode):
            raise ModelLoadError(f"{self.path} is a folder; give the GGUF file in it")
        # Loading must not wait for the writer of a pipe.
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"{self.path} is no regular file")
        # A relative path may come to mean another file.
        self.path = self.path.absolute()
        try:
            #: The file, or all shards of a split model. Private to the package.
            self.files = ModelFiles(self.path)
        except OSError as error:
            raise ModelLoadError(f"cannot read {self.path}: {error}") from error
        ensure_backends()
        n_gpu_layers = integer("n_gpu_layers", n_gpu_layers)
        if n_gpu_layers != 0 and all(d["kind"] not in ("gpu", "igpu") for d in _core.devices()):
            warnings.warn(
                f"n_gpu_layers={n_gpu_layers} has no effect: this build of llamatap has no GPU back "
                "end, or there is no GPU. Build it from source with: pip install . "
                "-C cmake.define.GGML_CUDA=ON",
                RuntimeWarning,
                stacklevel=2,
            )
        available = _system_limits.available_memory()
        try:
            self._native = _core.Model.load(
                os.fsencode(self.path),
                n_gpu_layers=n_gpu_layers,
                use_mmap=flag("use_mmap", use_mmap),
                load_mtp=flag("load_mtp", load_mtp),
                vocab_only=flag("vocab_only", vocab_only),
                weights=weights,
                memory_available=available,
                progress=progress,
            )
        finally:
            flush_log()
        if weights is None and not vocab_only and not self.devices and self.size_bytes > available:
            _logger.warning(
                "the weights of %s are %s, and %s of memory are available: they are read from the file "
                "again at each pass, which is slow",
                self.path.name,
                _system_limits.gibibytes(self.size_bytes),
                _system_limits.gibibytes(available),
            )
        if self._native.metadata.get("split.count", 1) == 1:
            self.files.only_first()

    @property
    def native(self) -> _core.Model:
        """The core's object. Private to the package.

        :raises ClosedError: the model was closed.
        """
        if self._native is None:
            raise ClosedError(f"the model {self.path.name} was closed")
        return self._native

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._native is None

    def close(self) -> None:
        """Give up the model; its memory is freed once its contexts are closed too.

        :raises BusyError: this thread is extracting with it (a signal handler or a log handler calls).
        """
        if self._extractor is not None:
            self._extractor.close()
            self._extractor = None
        self.__dict__.pop("layer_map", None)
        self._native = None

    def __repr__(self) -> str:
        if self._native is None:
            return f"Model({self.path.name!r}, closed)"
        return (
            f"Model({self.path.name!r}, arch={self.arch!r}, file_type={self.file_type!r}, "
            f"n_layer={self.n_layer}, n_embd={self.n_embd}, n_vocab={self.n_vocab})"
        )

    @property
    def arch(self) -> str:
        """The architecture, as ``general.architecture`` of the file names it."""
        return self.native.arch

    @property
    def description(self) -> str:
        """Architecture, number of parameters and file type: "llama 135M Q4_1". Of a file without
        weights, "llama vocabulary"."""
        return self.native.description

    @property
    def file_type(self) -> str:
        """The quantisation of the file, e.g. "F16", "Q4_1", "Q4_K - Medium"."""
        return self.native.file_type

    @property
    def n_layer(self) -> int:
        """The number of blocks n; layer ids are 0..n."""
        return self.native.n_layer

    @property
    def n_embd(self) -> int:
        """The width of the residual stream."""
        return self.native.n_embd

    @property
    def n_embd_input(self) -> int:
        """The width of embeddings that a batch may carry in place of tokens."""
        return self.native.n_embd_input

    @property
    def n_vocab(self) -> int:
        return self.native.n_vocab

    @property
    def n_ctx_train(self) -> int:
        """The longest context that the model was trained for, in tokens."""
        return self.native.n_ctx_train

    @property
    def n_params(self) -> int:
        """Elements of all tensors."""
        return self.native.n_params

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.native.size_bytes

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata, without arrays of more than 1,024 elements (the vocabulary)."""
        return dict(self.native.metadata)

    @property
    def bos_token(self) -> int | None:
        """The id of the token that begins a text; None where the vocabulary has none."""
        return self.native.bos

    @property
    def eos_token(self) -> int | None:
        """The id of the token that ends a text; None where the vocabulary has none."""
        return self.native.eos

    @property
    def devices(self) -> list[str]:
        """The GPUs that may hold layers; empty when all is on the CPU."""
        return self.native.device_names

    @property
    def chat_template(self) -> str | None:
        """The file's default chat template (Jinja2), if it has one."""
        return self.native.chat_template()

    @functools.cached_property
    def layer_map(self) -> _core.LayerMap:
        """Map from each layer to the engine's graph node that gives it: found at the first use, then kept.

        :raises UnsupportedError: the model carries no single residual stream.
        """
        try:
            return _core.LayerMap.resolve(self.native)
        finally:
            flush_log()

    @property
    def extractor(self) -> Extractor:
        """The extractor that :func:`llamatap.extract` uses when it is given this model."""
        from llamatap.extraction.extractor import Extractor

        with self._lock:
            self.native  # noqa: B018  raises when closed
            if self._extractor is None:
                # A strong reference would be a cycle, and models are too large to wait for its collection.
                self._extractor = Extractor(weakref.proxy(self))
            return self._extractor

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> NDArray[np.int32]:
        """Text to token ids, int32 ``(n,)``.

        :param add_special: add BOS and EOS (CLS and SEP) where the file says so. A text that brings its own
            (a rendered chat template, say) does not get a second one.
        :param parse_special: read special tokens in the text as such, not as plain text.
        :raises UnsupportedError: the file has no tokenizer.
        """
        native = self.native
        tokens = native.tokenize(
            _utf8(text), flag("add_special", add_special), flag("parse_special", parse_special)
        )
        if not add_special or not text:
            return tokens
        first, last = self.added_tokens
        if first is not None and len(tokens) > 1 and tokens[0] == tokens[1] == first:
            tokens = tokens[1:]
        # A BOS that was added in front is not the text's own, even where EOS is the same token.
        fewest = 1 if first is None else 2
        if last is not None and len(tokens) > fewest and tokens[-1] == tokens[-2] == last:
            tokens = tokens[:-1]
        return tokens.copy()

    @functools.cached_property
    def added_tokens(self) -> tuple[int | None, int | None]:
        """The tokens that ``add_special`` puts before and after a text: BOS and EOS, or CLS and SEP.

        None where it puts none.

        :raises UnsupportedError: the file has no tokenizer.
        """
        native = self.native
        alone = native.tokenize(b"", True, False).tolist()
        if len(alone) == 1:
            return (alone[0], None) if native.adds_bos and not native.adds_eos else (None, alone[0])
        return (alone[0], alone[-1]) if alone else (None, None)

    def detokenize(self, tokens: ArrayLike, *, skip_special: bool = False) -> str:
        """Token ids to text; bytes that are no UTF-8 become U+FFFD.

        :param skip_special: leave out special tokens.
        :raises InvalidInputError: an id is outside of the vocabulary.
        """
        skip = flag("skip_special", skip_special)
        text = self.native.detokenize(token_array(tokens), skip, not skip)
        return text.decode(errors="replace")

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token, which need not be whole UTF-8 characters.

        :param special: whether special tokens have their text; else they have none.
        """
        return self.native.piece(integer("a token id", token), flag("special", special))

    def is_end_of_generation(self, token: int) -> bool:
        """Whether a model that emits this token has finished (EOS, EOT, ...)."""
        return self.native.is_end_of_generation(integer("a token id", token))

    def token_embeddings(self, tokens: ArrayLike) -> NDArray[np.float32]:
        """Rows of the token embedding matrix, dequantised: float32 ``(n, n_embd)``.

        Before any scaling, norm or position that the architecture applies to them, so not always H_0.
        """
        return self.native.token_embeddings(token_array(tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render messages as the model was trained to read them.

        :param messages: mappings with ``role`` and ``content``, and whatever else the template knows.
        :param add_generation_prompt: end with the start of an assistant's turn.
        :param template: a template in place of the file's own.
        :param kwargs: variables for the template, e.g. ``tools`` or ``enable_thinking``.
        :returns: text with special tokens in it; :meth:`tokenize` adds no second BOS.
        :raises UnsupportedError: the file has no chat template.
        :raises InvalidInputError: the template fails or refuses the messages.
        """
        text = template if template is not None else self.chat_template
        if text is None:
            raise UnsupportedError(f"{self.path.name} has no chat template; give one as template=")
        found = self._render(text, messages, add_generation_prompt=add_generation_prompt, **kwargs)
        self.unparsed_tokens(text)
        return found

    def unparsed_tokens(self, template: str | None = None) -> dict[str, int]:
        """Tokens that a chat template writes as control tokens and that this file does not mark as such.

        :meth:`tokenize` splits them, and the model reads a chat that it was not trained on. The logger
        ``llamatap`` tells of them once a model.

        :param template: a template in place of the file's own.
        :returns: their ids by their spelling; empty where all is well, or there is no template or tokenizer.
        """
        text = template if template is not None else self.chat_template
        if text is None:
            return {}
        if text not in self._unparsed:
            texts = unparsed_tokens.probe_texts(functools.partial(self._render, text))
            try:
                found = unparsed_tokens.unparsed(self.native, texts)
            except UnsupportedError:
                found = {}
            with self._lock:
                first = not any(self._unparsed.values())
                self._unparsed[text] = found
            if found and first:
                _logger.warning("%s: %s", self.path.name, unparsed_tokens.say(found))
        return dict(self._unparsed[text])

    def _render(self, template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        native = self.native

        def spelled(token: int | None) -> str:
            return "" if token is None else native.token_text(token).decode(errors="replace")

        own = {"bos_token": spelled(native.bos), "eos_token": spelled(native.eos)}
        return templates.render(template, messages, **own | variables)

    def context(self, **options: Unpack[ContextOptions]) -> Context:
        """A new context; the options are those of :class:`llamatap.Context`."""
        from llamatap.context import Context

        return Context(self, **options)
