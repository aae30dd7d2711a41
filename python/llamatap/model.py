"""Model: a loaded GGUF file, with the contexts that are made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamatap._options import takes_options
from llamatap.context import Context
from llamatap.context_options import ContextOptions
from llamatap.loaded_model import LoadedModel

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Model"]


class Model(LoadedModel):
    """A model loaded from a GGUF file.

    :param path: the file (of a split model: the first one).
    :param n_gpu_layers: number of layers on the GPU; -1 for all. 0 uses no GPU at all.
    :param use_mmap: map the file instead of reading it.
    :param load_mtp: load the model's own multi-token-prediction blocks too.
    :param vocab_only: load only the tokenizer and the metadata.
    :param weights: ``"f32"``, ``"f16"`` or ``"bf16"``: convert weights that are not float32 to this type
        before they are loaded, rounded to nearest; for CPUs that are slow with the file's type (Q4_1). They
        then take that type's size in memory, and ``use_mmap`` has no effect. The engine rounds the other
        factor of a product with weights to 8 bits for quantised ones, 11 for float16, 8 for bfloat16, and not
        at all for float32: with ``"f32"`` the states are those of the file's weights, exact to float32.
    :param progress: called with the fraction loaded, in 0..1, about every 50 ms.
    :raises InvalidInputError: an argument is wrong, or a weight overflows float16 with ``weights="f16"``.
    :raises ModelNotFoundError: there is no such file.
    :raises ModelLoadError: the file cannot be loaded; with what the engine said.
    :raises OutOfMemoryError: the weights do not fit into memory. Weights of a mapped file need not fit, as
        pages can be dropped and read again at each pass; the logger ``llamatap`` warns of that. (Weights that
        the CPU stores in another order, mostly those of 4 bits, are copies and must fit.)

    A model can be shared by contexts in several threads. ``close()``, or leaving a ``with`` block, frees its
    memory once its contexts are closed too.
    """

    @takes_options(ContextOptions)
    def context(self, **options: Unpack[ContextOptions]) -> Context:
        """Create a context of this model; raises what :class:`llamatap.Context` raises.

        :options:
        """
        return Context(self, **options)
