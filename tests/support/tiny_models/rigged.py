"""Models that do what a table says: targets whose next token follows from the last one alone, and drafters.

A table f of 64 entries gives the next token for each token. The width is 64, too, and token t is the unit
vector e_t times 8, of which the root mean square is 1: norms with weights of one leave it as it is. Attention
and feed-forward of a target add nothing, so every H_i is 8 e_t, and row v of the head has a value in the
columns t with f(t) = v. The logit of f(t) is ``MARGIN``, all others are 0.

A drafter follows a table of its own, g. What tells it the last token is either half of its inputs:

- *token*: the token of the last pair. The draft after a text that ends in t is g(t), g(g(t)), ...: each token
  follows from the one before it, as in a model of its own.
- *state*: the state of the last pair, which is of the position before. A feed-forward part takes 8 e_t to
  8 e_f(t), for any t: it stands for the target's own step. With u the token *before* the last one, the draft
  is g(f(u)), g(f(f(u))), ..., and where the target is greedy, f(u) is the last token t: g(t), g(f(t)), ...
  So after a wrong token the draft does not go on from that token: it goes on as if the target's had been
  drafted. It depends neither on the tokens drafted nor on the last token of the text: where that is not f(u),
  the draft is that of a text in which it were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from support.tiny_models import EPS, Value
from support.tiny_models.drafters import (
    HEAD_WIDTH,
    N_HEAD,
    ROPE_BASE,
    Tensors,
    Vocabulary,
    decoder_keys,
    mimo2_keys,
    write_file,
)

Table: TypeAlias = "Sequence[int]"
Half: TypeAlias = Literal["token", "state"]
#: Given a text and the most tokens wanted, the tokens drafted.
Draft: TypeAlias = "Callable[[Sequence[int], int], list[int]]"

N_VOCAB = 64
SIZE = 8.0  # of a state; sqrt(N_VOCAB)
N_LAYER = 4
MARGIN = 8.0
FIRST = 3  # tokens before this one are control tokens

#: Letters, a space, a line break and some marks: text of these is tokenised and detokenised one to one.
VOCABULARY = Vocabulary(
    (
        *("<unk>", "<s>", "</s>", "<0x0A>", "\N{LOWER ONE EIGHTH BLOCK}"),
        *(chr(ord("a") + i) for i in range(26)),
        *(chr(ord("A") + i) for i in range(26)),
        *".,!?:-'",
    )
)


def cycle(step: int = 1) -> list[int]:
    """A table that goes round tokens 3..63 in this step, without coming upon a control token."""
    count = N_VOCAB - FIRST
    return [FIRST + (token - FIRST + step) % count for token in range(N_VOCAB)]


def wrong_at(table: Table, tokens: Iterable[int], by: int = 7) -> list[int]:
    """The table with other entries, of tokens 3..63 too, at these tokens."""
    changed = list(table)
    for token in tokens:
        changed[token] = FIRST + (changed[token] - FIRST + by) % (N_VOCAB - FIRST)
    return changed


def restricted(table: Table, vocabulary: Sequence[int]) -> list[int]:
    """The table of a drafter whose head has only these tokens: the lowest one replaces all others."""
    return [entry if entry in vocabulary else min(vocabulary) for entry in table]


def probability(margin: float = MARGIN, n_vocab: int = N_VOCAB) -> float:
    """e^margin / (e^margin + n_vocab - 1): of the predicted token, with a head of n_vocab tokens."""
    return math.exp(margin) / (math.exp(margin) + n_vocab - 1)


def by_token(*tables: Table) -> Draft:
    """Drafts of a drafter that reads tokens.

    :param tables: one for all steps, or of several one for each step, and no more steps than these.
    """

    def draft(tokens: Sequence[int], n: int) -> list[int]:
        found = [tokens[-1]]
        for table in _steps(tables, n):
            found.append(table[found[-1]])
        return found[1:]

    return draft


def by_state(f: Table, *tables: Table) -> Draft:
    """Drafts of a drafter that reads states.

    :param f: the table of its feed-forward part.
    :param tables: those of its heads, as for :func:`by_token`.
    """

    def draft(tokens: Sequence[int], n: int) -> list[int]:
        state, found = tokens[-2], []
        for table in _steps(tables, n):
            state = f[state]
            found.append(table[state])
        return found

    return draft


def _steps(tables: Sequence[Table], n: int) -> Sequence[Table]:
    return [tables[0]] * n if len(tables) == 1 else tables[:n]


@dataclass(frozen=True)
class Round:
    drafted: tuple[int, ...]
    n_accepted: int
    emitted: tuple[int, ...]  # the accepted ones and the target's next


@dataclass(frozen=True)
class Simulation:
    first: int  # sampled from the prompt; no round
    rounds: tuple[Round, ...]

    @property
    def tokens(self) -> list[int]:
        """All emitted tokens."""
        return [self.first, *(token for round in self.rounds for token in round.emitted)]

    @property
    def n_drafted(self) -> int:
        return sum(len(round.drafted) for round in self.rounds)

    @property
    def n_accepted(self) -> int:
        return sum(round.n_accepted for round in self.rounds)


def simulate(f: Table, draft: Draft, prompt: Sequence[int], n_max: int, max_tokens: int) -> Simulation:
    """Greedy speculative decoding with a target that follows f.

    The prompt gives a first token. Then, as long as tokens are missing, a round drafts after all tokens up to
    now and emits the drafted ones for which the target says the same, and the target's next one.

    :param n_max: the most tokens of a draft. It is no longer either than leaves room for the target's own
        token, so a last round may have none.
    :param max_tokens: how many tokens are emitted in all, the first one included.
    """
    text = [*prompt, f[prompt[-1]]]
    rounds = []
    while (room := max_tokens - (len(text) - len(prompt))) > 0:
        wanted = min(n_max, room - 1)
        drafted = draft(text, wanted)[:wanted] if wanted else []
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == f[text[-1]]:
            text.append(drafted[accepted])
            accepted += 1
        text.append(f[text[-1]])
        rounds.append(Round(tuple(drafted), accepted, tuple(text[-accepted - 1 :])))
    return Simulation(text[len(prompt)], tuple(rounds))


def _ones(width: int = N_VOCAB) -> NDArray[np.float32]:
    return np.ones(width, np.float32)


def _identity() -> NDArray[np.float32]:
    return np.eye(N_VOCAB, dtype=np.float32)


def _zeros(columns: int = N_VOCAB) -> NDArray[np.float32]:
    return np.zeros((N_VOCAB, columns), np.float32)


def _matrix(table: Table) -> NDArray[np.float32]:
    """The matrix that maps e_t to e_table(t)."""
    matrix = _zeros()
    matrix[table, np.arange(N_VOCAB)] = 1
    return matrix


def _head(table: Table, margin: float) -> NDArray[np.float32]:
    return _matrix(table) * np.float32(margin / SIZE)


def _ends(table: Table, margin: float) -> Tensors:
    return {
        "token_embd.weight": _identity() * np.float32(SIZE),
        "output_norm.weight": _ones(),
        "output.weight": _head(table, margin),
    }


def _feed_forward(block: str, f: Table | None) -> Tensors:
    """Takes a stream of 8 e_t to 8 e_f(t); None: leaves it.

    A stream of 8 e_t is normed to a e_t, a = 8 / sqrt(1 + EPS). Unit t gives silu(a) * a there, all others 0.
    """
    down = _zeros()
    if f is not None:
        normed = SIZE / math.sqrt(1 + EPS)
        unit = normed / (1 + math.exp(-normed)) * normed
        down = (_matrix(f) - _identity()) * np.float32(SIZE / unit)
    return {
        f"{block}ffn_norm.weight": _ones(),
        f"{block}ffn_gate.weight": _identity(),
        f"{block}ffn_up.weight": _identity(),
        f"{block}ffn_down.weight": down,
    }


def _idle_attention(block: str, *, fused: bool, inputs: int = N_VOCAB) -> Tensors:
    """Keys and values of zero, and nothing added to the stream."""
    width = N_HEAD * HEAD_WIDTH
    parts = {"qkv": 3 * width} if fused else dict.fromkeys("qkv", width)
    return {
        f"{block}attn_norm.weight": _ones(),
        **{
            f"{block}attn_{part}.weight": np.zeros((rows, inputs), np.float32) for part, rows in parts.items()
        },
        f"{block}attn_output.weight": _zeros(width),
    }


def _trunk(n_layer: int, *, fused: bool) -> Tensors:
    tensors: Tensors = {}
    for index in range(n_layer):
        block = f"blk.{index}."
        tensors |= {**_idle_attention(block, fused=fused), **_feed_forward(block, None)}
    return tensors


def write_rigged_model(path: Path, table: Table, *, n_layer: int = N_LAYER, margin: float = MARGIN) -> Path:
    """A model of the llama architecture: a target, or a drafter in its own right (*token*).

    :param margin: the logit of the next token, all others being 0.
    """
    keys = decoder_keys(n_layer, N_VOCAB, N_VOCAB, N_HEAD, ROPE_BASE)
    tensors = {**_ends(table, margin), **_trunk(n_layer, fused=False)}
    return write_file(path, "llama", keys, tensors, VOCABULARY)


def write_rigged_mtp(
    path: Path,
    f: Table,
    tables: Sequence[Table] = (),
    *,
    half: Half = "token",
    trunk: bool = True,
    n_layer: int = N_LAYER,
    margin: float = MARGIN,
) -> Path:
    """A target of architecture mimo2 that follows f, with blocks of multi-token prediction in the same file.

    :param tables: what the heads of appended blocks follow, one block each. One block is used for all steps,
        of several each for its own. Empty: a target without such blocks.
    :param half: what blocks read: :func:`by_token` of the tables or :func:`by_state` of f and the tables.
    :param trunk: False leaves the trunk's blocks out: a file for another target.
    :param margin: of all heads.
    """
    tensors = {**_ends(f, margin), **(_trunk(n_layer, fused=True) if trunk else {})}
    fold = [_identity(), _zeros()] if half == "token" else [_zeros(), _identity()]
    for index, table in enumerate(tables, n_layer):
        block = f"blk.{index}."
        tensors |= {
            **_idle_attention(block, fused=True),
            **_feed_forward(block, None if half == "token" else f),
            f"{block}nextn.eh_proj.weight": np.concatenate(fold, axis=1) * np.float32(math.sqrt(1 + EPS)),
            f"{block}nextn.enorm.weight": _ones(),
            f"{block}nextn.hnorm.weight": _ones(),
            f"{block}nextn.shared_head_norm.weight": _ones(),
            f"{block}nextn.shared_head_head.weight": _head(table, margin),
        }
    return write_file(path, "mimo2", mimo2_keys(n_layer, len(tables), N_VOCAB, N_HEAD), tensors, VOCABULARY)


def write_rigged_eagle3(
    path: Path,
    f: Table,
    table: Table | None,
    *,
    half: Half = "state",
    target_layers: tuple[int, int, int] = (1, 2, 3),
    own_embedding: bool = True,
    draft_vocab: Sequence[int] | None = None,
    norm_before_residual: bool = False,
    margin: float = MARGIN,
) -> Path:
    """An EAGLE-3 drafter for a target that follows f. Its fc takes a weighted mean of the three states.

    The stream carries the state alone, so a drafter of *token* has to attend: its keys and queries are the
    same for all tokens and so large that, turned by their positions, each position sees itself alone. Values
    are the difference of token and state, which added to the state leave the token.

    :param table: what the head follows; None: no head of its own, so that it follows what the target's does.
    :param half: what it reads: :func:`by_token` of the table or :func:`by_state` of f and the table.
    :param draft_vocab: the head's tokens, ascending; then the draft follows :func:`restricted` of the table.
    """
    block, width = "blk.0.", N_HEAD * HEAD_WIDTH
    tensors: Tensors = {
        "fc.weight": np.concatenate([_identity() * np.float32(part) for part in (0.5, 0.25, 0.25)], axis=1),
        **_idle_attention(block, fused=False, inputs=2 * N_VOCAB),
        f"{block}attn_norm_2.weight": _ones(),
        **_feed_forward(block, f if half == "state" else None),
        "output_norm.weight": _ones(),
    }
    if half == "token":
        # Scores are 64 times a sum of eight cosines, which a distance of one or more lowers by 0.49 or more.
        constant = np.zeros((width, 2 * N_VOCAB), np.float32)
        constant[::2, :N_VOCAB] = 16 / SIZE
        tensors[f"{block}attn_q.weight"] = tensors[f"{block}attn_k.weight"] = constant
        tensors[f"{block}attn_v.weight"] = np.concatenate([_identity(), -_identity()], axis=1)
        tensors[f"{block}attn_output.weight"] = _identity()
    if own_embedding:
        tensors["token_embd.weight"] = _identity() * np.float32(SIZE)
    if table is not None:
        # Where the table's entry has no row, rounding would choose among logits of zero.
        kept = range(N_VOCAB) if draft_vocab is None else draft_vocab
        tensors["output.weight"] = _head(restricted(table, kept), margin)[list(kept)]
    if draft_vocab is not None:
        tensors["d2t"] = np.array(draft_vocab, np.int64)
    keys: dict[str, Value] = {
        **decoder_keys(1, N_VOCAB, N_VOCAB, N_HEAD, ROPE_BASE),
        "target_layers": list(target_layers),
        "target_hidden_size": N_VOCAB,
        "norm_before_residual": norm_before_residual,
    }
    return write_file(path, "eagle3", keys, tensors, VOCABULARY)
