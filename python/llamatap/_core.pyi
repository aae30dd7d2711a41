"""
llamatap's native core. Private: use the llamatap package.
"""

from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing

__all__: list[str] = [
    "Batch",
    "Context",
    "Drafter",
    "LayerMap",
    "Model",
    "Sampler",
    "SpeculativeContext",
    "allocate",
    "build_info",
    "cpu_features",
    "devices",
    "drain_log",
    "load_backends",
    "logprobs",
    "logprobs_of",
    "ngram_drafter",
    "read_metadata",
    "shut_down",
    "speculative_drafter",
    "suffix_drafter",
    "verify",
]

class Model:
    """
    A loaded model.
    """
    @staticmethod
    def load(
        path: bytes,
        *,
        progress: typing.Any,
        n_gpu_layers: typing.SupportsInt | typing.SupportsIndex,
        use_mmap: bool,
        load_mtp: bool,
        vocab_only: bool,
        weights: str | None,
        memory_available: typing.SupportsInt | typing.SupportsIndex,
    ) -> Model:
        """
        Load a GGUF file. `progress(fraction)` is called about every 50 ms.
        """
    def __reduce__(self) -> typing.Any: ...
    def chat_template(self, name: str | None = None) -> str | None: ...
    def detokenize(
        self, tokens: numpy.typing.NDArray[numpy.int32], remove_special: bool, unparse_special: bool
    ) -> bytes: ...
    def find_tokens(self, texts: collections.abc.Sequence[str]) -> list[int | None]:
        """
        For each text: the token with exactly this spelling, or None.
        """
    def is_control(self, token: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    def is_end_of_generation(self, token: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    def piece(self, token: typing.SupportsInt | typing.SupportsIndex, special: bool) -> bytes: ...
    def token_embeddings(
        self, tokens: numpy.typing.NDArray[numpy.int32]
    ) -> numpy.typing.NDArray[numpy.float32]: ...
    def token_text(self, token: typing.SupportsInt | typing.SupportsIndex) -> bytes: ...
    def tokenize(
        self, utf8: bytes, add_special: bool, parse_special: bool
    ) -> numpy.typing.NDArray[numpy.int32]: ...
    @property
    def adds_bos(self) -> bool: ...
    @property
    def adds_eos(self) -> bool: ...
    @property
    def arch(self) -> str: ...
    @property
    def batches_sequences(self) -> bool: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def description(self) -> str: ...
    @property
    def device_names(self) -> list[str]: ...
    @property
    def eos(self) -> int | None: ...
    @property
    def eot(self) -> int | None: ...
    @property
    def file_type(self) -> str: ...
    @property
    def is_hybrid(self) -> bool: ...
    @property
    def is_recurrent(self) -> bool: ...
    @property
    def metadata(
        self,
    ) -> dict[
        str, bool | int | int | float | str | list[bool] | list[int] | list[int] | list[float] | list[str]
    ]: ...
    @property
    def n_ctx_train(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_embd_input(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_params(self) -> int: ...
    @property
    def n_swa(self) -> int:
        """
        Width of its sliding window; 0 without one.
        """
    @property
    def n_vocab(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

class Batch:
    """
    Input of one decode: entries of (token, position, sequence, output flag).

    Rows of states and logits are in the order of the entries, whatever order the engine computes them in.
    A batch holds token ids, or embeddings when made with ``n_embd``.
    """
    @staticmethod
    def of(
        tokens: collections.abc.Sequence[typing.SupportsIndex],
        seq: typing.SupportsIndex = 0,
        pos0: typing.SupportsIndex = 0,
    ) -> Batch:
        """
        A batch of consecutive tokens of one sequence; the last one is an output.

        :param tokens: token ids, in a list or an array of integers.
        :param seq: the sequence that they belong to.
        :param pos0: the position of the first one.
        :raises InvalidInputError: ``tokens`` are not token ids.
        """
    def __init__(self, n_embd: typing.SupportsIndex = 0) -> None:
        """
        An empty batch: of tokens, or of embeddings of width ``n_embd`` when that is not 0.
        """
    def __len__(self) -> int: ...
    def __reduce__(self) -> typing.Any: ...
    def add(
        self,
        token: typing.SupportsIndex,
        pos: typing.SupportsIndex,
        seq: typing.SupportsIndex | collections.abc.Sequence[typing.SupportsIndex] = 0,
        output: bool = False,
    ) -> None:
        """
        Append a token.

        :param pos: its position in the sequence, from 0.
        :param seq: the sequence that it belongs to, or a list of sequences.
        :param output: whether logits are wanted for it.
        :raises InvalidInputError: the batch holds embeddings.
        """
    def add_embedding(
        self,
        values: numpy.typing.NDArray[numpy.float32],
        pos: typing.SupportsIndex,
        seq: typing.SupportsIndex | collections.abc.Sequence[typing.SupportsIndex] = 0,
        output: bool = False,
    ) -> None:
        """
        Append an embedding in place of a token.

        :param values: float32[n_embd], C-contiguous; copied.
        :raises InvalidInputError: the width is wrong, a value is NaN or infinite, or the batch holds tokens.
        """
    def clear(self) -> None:
        """
        Remove all entries.
        """
    @property
    def n_embd(self) -> int:
        """
        Width of embedding entries; 0 for tokens.
        """
    @property
    def outputs(self) -> list[bool]:
        """
        The output flag of each entry.
        """
    @property
    def positions(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        int32[n].
        """
    @property
    def sequences(self) -> list[list[int]]:
        """
        The sequences of each entry.
        """
    @property
    def tokens(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        int32[n]: the token ids; empty for embeddings.
        """

class Context:
    """
    A model with memory.
    """
    def __init__(
        self,
        model: Model,
        *,
        n_ctx: typing.SupportsInt | typing.SupportsIndex,
        n_batch: typing.SupportsInt | typing.SupportsIndex,
        n_ubatch: typing.SupportsInt | typing.SupportsIndex,
        n_seq_max: typing.SupportsInt | typing.SupportsIndex,
        n_threads: typing.SupportsInt | typing.SupportsIndex,
        type_k: str,
        type_v: str,
        flash_attention: typing.SupportsInt | typing.SupportsIndex,
        kv_unified: bool,
        memory_available: typing.SupportsInt | typing.SupportsIndex,
        n_rs_seq: typing.SupportsInt | typing.SupportsIndex,
        n_outputs_max: typing.SupportsInt | typing.SupportsIndex,
        swa_full: bool,
    ) -> None: ...
    def __reduce__(self) -> typing.Any: ...
    def decode(self, batch: Batch) -> None: ...
    def decode_tapped(
        self,
        map: LayerMap,
        slots: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        dtype: str,
        outputs_only: bool,
        batch: Batch,
        way: str = "automatic",
    ) -> tuple[numpy.ndarray[typing.Any, numpy.dtype[typing.Any]], numpy.typing.NDArray[numpy.int32]]:
        """
        Decode and capture: (array [rows, n_slots, n_embd], int32 token ids of the rows). `way` is callback, copies, hooks, or automatic: the faster one.
        """
    def extract(
        self,
        map: LayerMap,
        slots: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        dtype: str,
        jobs: list[
            tuple[numpy.typing.NDArray[numpy.int32], int, int, str, numpy.typing.NDArray[numpy.uint8]]
        ],
        cancelled: collections.abc.Callable[[], bool] | None = None,
        way: str = "callback",
    ) -> bool:
        """
        Capture without logits: jobs are (tokens, begin, end, pooling, out as bytes), one sequence each. `cancelled` is called about every 50 ms; when it returns True, CancelledError is raised. Returns whether all values of the last wanted layer are finite.
        """
    def logits(
        self, row: typing.SupportsInt | typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.float32]: ...
    def memory_clear(self) -> None: ...
    def memory_copy(
        self,
        source: typing.SupportsInt | typing.SupportsIndex,
        target: typing.SupportsInt | typing.SupportsIndex,
        p0: typing.SupportsInt | typing.SupportsIndex,
        p1: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def memory_first(self, seq: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def memory_keep(self, seq: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def memory_last(self, seq: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def memory_remove(
        self,
        seq: typing.SupportsInt | typing.SupportsIndex,
        p0: typing.SupportsInt | typing.SupportsIndex,
        p1: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def memory_shift(
        self,
        seq: typing.SupportsInt | typing.SupportsIndex,
        p0: typing.SupportsInt | typing.SupportsIndex,
        p1: typing.SupportsInt | typing.SupportsIndex,
        delta: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def restore(self, seq: typing.SupportsInt | typing.SupportsIndex, state: bytes) -> None: ...
    def save(self, seq: typing.SupportsInt | typing.SupportsIndex) -> bytes: ...
    @property
    def causal(self) -> bool: ...
    @property
    def engine_seconds(self) -> float: ...
    @property
    def flash_attention(self) -> bool: ...
    @property
    def has_memory(self) -> bool: ...
    @property
    def n_batch(self) -> int: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_ctx_seq(self) -> int: ...
    @property
    def n_ubatch(self) -> int: ...
    @property
    def nodes_seen(self) -> int: ...
    @property
    def position_limit(self) -> int: ...
    @property
    def zeroed_cells(self) -> int: ...

class LayerMap:
    """
    Maps each layer of a model to its node in the engine's graph.
    """
    @staticmethod
    def resolve(model: Model) -> LayerMap: ...
    def __reduce__(self) -> typing.Any: ...
    @property
    def at_once(self) -> bool: ...
    @property
    def has_memory(self) -> bool: ...
    @property
    def has_norm(self) -> bool: ...
    @property
    def hooked(self) -> list[bool]:
        """
        By slot: whether the engine's layer-input hook gives the same node.
        """
    @property
    def n_embd(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def nodes(self) -> list[tuple[str, bool]]:
        """
        By slot (0..n, then the norm): the node's name, and whether it has rows for outputs only. The norm's name is empty when the model has none.
        """
    @property
    def norm_slot(self) -> int: ...

class Sampler:
    """
    The engine's sampler chain.
    """
    def __init__(
        self,
        model: Model,
        *,
        temperature: typing.SupportsFloat | typing.SupportsIndex,
        top_k: typing.SupportsInt | typing.SupportsIndex,
        top_p: typing.SupportsFloat | typing.SupportsIndex,
        min_p: typing.SupportsFloat | typing.SupportsIndex,
        repeat_penalty: typing.SupportsFloat | typing.SupportsIndex,
        frequency_penalty: typing.SupportsFloat | typing.SupportsIndex,
        presence_penalty: typing.SupportsFloat | typing.SupportsIndex,
        penalty_last_n: typing.SupportsInt | typing.SupportsIndex,
        seed: typing.SupportsInt | typing.SupportsIndex,
        logit_bias: collections.abc.Sequence[
            tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
        ],
    ) -> None: ...
    def __reduce__(self) -> typing.Any: ...
    def accept(self, token: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def reset(self) -> None: ...
    def sample(self, context: Context, row: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def sample_logits(self, logits: numpy.typing.NDArray[numpy.float32]) -> int: ...

class SpeculativeContext:
    """
    Draft model's context, for all sequences of the target.
    """
    def __init__(
        self,
        target: Context,
        draft: Model,
        *,
        plain: bool,
        n_ctx: typing.SupportsInt | typing.SupportsIndex,
        n_batch: typing.SupportsInt | typing.SupportsIndex,
        n_ubatch: typing.SupportsInt | typing.SupportsIndex,
        n_seq_max: typing.SupportsInt | typing.SupportsIndex,
        n_threads: typing.SupportsInt | typing.SupportsIndex,
        type_k: str,
        type_v: str,
        flash_attention: typing.SupportsInt | typing.SupportsIndex,
        kv_unified: bool,
        memory_available: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def __reduce__(self) -> typing.Any: ...
    def decode(
        self,
        tokens: numpy.typing.NDArray[numpy.int32],
        states: numpy.typing.NDArray[numpy.float32] | None,
        positions: numpy.typing.NDArray[numpy.int32],
        seqs: numpy.typing.NDArray[numpy.int32],
        outputs: collections.abc.Sequence[bool],
        top_k: typing.SupportsInt | typing.SupportsIndex,
        with_logits: bool,
        head: typing.SupportsInt | typing.SupportsIndex,
    ) -> tuple[
        numpy.typing.NDArray[numpy.int32],
        numpy.typing.NDArray[numpy.float32],
        numpy.typing.NDArray[numpy.float32] | None,
        numpy.typing.NDArray[numpy.float32] | None,
    ]:
        """
        Decode pairs: (ids, probabilities, next states or None, logits or None) of the outputs.
        """
    def encode(
        self, features: numpy.typing.NDArray[numpy.float32]
    ) -> numpy.typing.NDArray[numpy.float32]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def context(self) -> Context: ...
    @property
    def kind(self) -> str: ...
    @property
    def longest_block(self) -> int | None: ...
    @property
    def n_features(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def n_state(self) -> int: ...
    @property
    def target_slots(self) -> list[int]: ...

class Drafter:
    """
    Drafts the next tokens of sequences.
    """
    def __reduce__(self) -> typing.Any: ...
    def accept(
        self, seq: typing.SupportsInt | typing.SupportsIndex, n: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def draft(
        self,
        requests: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
                typing.SupportsInt | typing.SupportsIndex,
            ]
        ],
    ) -> list[
        tuple[
            numpy.typing.NDArray[numpy.int32],
            numpy.typing.NDArray[numpy.float32] | None,
            numpy.typing.NDArray[numpy.float32] | None,
        ]
    ]:
        """
        Requests are (sequence, last token, its position, n_max, seed); drafts are (tokens, probabilities or None, distributions or None), in the same order.
        """
    def process(self, batch: Batch, states: numpy.typing.NDArray[numpy.float32] | None = None) -> None: ...
    def reset(self, seq: typing.SupportsInt | typing.SupportsIndex) -> None: ...

def allocate(
    shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], dtype: str, model: Model
) -> numpy.ndarray[typing.Any, numpy.dtype[typing.Any]]:
    """
    A writable array for states of a model, aligned to 64 bytes, not initialised; bfloat16 as uint16. For a model on a GPU it lies in pinned memory, which is used again when the last view ends.
    """

def build_info() -> dict[str, str]:
    """
    Versions and options of this build.
    """

def cpu_features() -> list[tuple[str, str]]:
    """
    CPU features that the CPU back end was compiled for: (feature, value) pairs.
    """

def devices() -> list[dict[str, typing.Any]]:
    """
    Devices of the loaded back ends.
    """

def drain_log() -> list[tuple[int, str]]:
    """
    Log lines of the engine since the last call: (logging level, text), oldest first.
    """

def load_backends(folder: str) -> None:
    """
    Load the engine's back ends from a folder, once per process.
    """

def logprobs(
    context: Context,
    first_row: typing.SupportsInt | typing.SupportsIndex,
    tokens: numpy.typing.NDArray[numpy.int32],
    n_top: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[
    numpy.typing.NDArray[numpy.float64],
    numpy.typing.NDArray[numpy.int32],
    numpy.typing.NDArray[numpy.float64],
]:
    """
    For tokens at the outputs first_row, first_row + 1, ...: (log-probabilities of the tokens, the most likely ids, their log-probabilities).
    """

def logprobs_of(
    logits: numpy.typing.NDArray[numpy.float32],
    token: typing.SupportsInt | typing.SupportsIndex,
    n_top: typing.SupportsInt | typing.SupportsIndex,
) -> tuple[
    numpy.typing.NDArray[numpy.float64],
    numpy.typing.NDArray[numpy.int32],
    numpy.typing.NDArray[numpy.float64],
]:
    """
    Like logprobs(), for one token and one row of logits.
    """

def ngram_drafter(
    *,
    n_longest: typing.SupportsInt | typing.SupportsIndex,
    n_shortest: typing.SupportsInt | typing.SupportsIndex,
    n_max: typing.SupportsInt | typing.SupportsIndex,
    n_min: typing.SupportsInt | typing.SupportsIndex,
) -> Drafter:
    """
    A drafter of the tokens that followed an earlier occurrence of the last n-gram.
    """

def read_metadata(
    path: bytes,
) -> dict[str, bool | int | int | float | str | list[bool] | list[int] | list[int] | list[float] | list[str]]:
    """
    The metadata of a GGUF file, without arrays of more than 1,024 elements.
    """

def shut_down() -> None:
    """
    Stop all running work and refuse new work, before the interpreter exits.
    """

def speculative_drafter(
    spec: SpeculativeContext,
    *,
    n_max: typing.SupportsInt | typing.SupportsIndex,
    n_min: typing.SupportsInt | typing.SupportsIndex,
    p_min: typing.SupportsFloat | typing.SupportsIndex,
    temperature: typing.SupportsFloat | typing.SupportsIndex,
    seed: typing.SupportsInt | typing.SupportsIndex,
) -> Drafter:
    """
    A drafter on a draft context: token by token, or a block at a time.
    """

def suffix_drafter(
    *,
    max_bytes: typing.SupportsInt | typing.SupportsIndex,
    n_max: typing.SupportsInt | typing.SupportsIndex,
    n_min: typing.SupportsInt | typing.SupportsIndex,
    p_min: typing.SupportsFloat | typing.SupportsIndex,
    max_spec_factor: typing.SupportsFloat | typing.SupportsIndex,
) -> Drafter:
    """
    A drafter of the tokens that followed the longest suffix of the text in any text before.
    """

def verify(
    context: Context,
    sampler: Sampler,
    first_row: typing.SupportsInt | typing.SupportsIndex,
    draft: numpy.typing.NDArray[numpy.int32],
    distributions: numpy.typing.NDArray[numpy.float32] | None,
    end_of_generation: bool,
    stops: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
) -> tuple[list[int], int]:
    """
    Verify a draft: (tokens, number of accepted draft tokens).
    """
