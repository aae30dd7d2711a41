"""A pass of the target: which entries each request has in it, its batch, and its tap."""

from __future__ import annotations

from collections.abc import Sequence

from llamatap._engine_context import Capture, EngineContext
from llamatap.context import Batch, Context
from llamatap.generation.request import Request
from llamatap.layers import LayerId
from llamatap.states import States
from llamatap.tap import Tap

__all__ = ["TargetPass", "assign_entries"]


def assign_entries(requests: Sequence[Request], context: Context, most_scored: int) -> None:
    """Choose how many entries each request has in the next pass: newest tokens and drafts first, then as much
    of the prompts as fits into the engine call.

    :param requests: the requests in flight, oldest first.
    :param most_scored: maximum number of entries of prompts whose tokens are all outputs, each with logits.
    """
    for request in requests:
        request.n_entries = 0 if request.in_prefill else 1 + len(request.draft.tokens)
    in_prefill = [request for request in requests if request.in_prefill]
    if not in_prefill:
        return
    n_batch = context.n_batch
    left = max(
        n_batch - sum(request.n_entries for request in requests),
        # A batch that is full without prompts still takes a ubatch of them.
        min(context.n_ubatch, n_batch),
    )
    left_scored = min(left, most_scored)
    # The oldest prompt gets at least half of the room, so that its prefill progresses. Then the shortest
    # remainder first: short prompts do not wait for a long one.
    shortest_first = sorted(in_prefill, key=lambda request: request.n_prompt_left)
    for request, divisor in [(in_prefill[0], 2), *((request, 1) for request in shortest_first)]:
        room = min(left, left_scored) if request.scores_prompt else left
        n_more = min(request.n_prompt_left - request.n_entries, -(-room // divisor))
        request.n_entries += n_more
        left -= n_more
        if request.scores_prompt:
            left_scored -= n_more


class TargetPass:
    """One decode of the target for some requests.

    :param requests: the requests; this sets their ``n_prefilled``, and ``first_row`` and ``first_state``, the
        places of their outputs.
    :param drafter_layers: the layers whose states the drafter needs, of all rows.
    """

    def __init__(
        self, engine: EngineContext, requests: Sequence[Request], drafter_layers: tuple[LayerId, ...]
    ) -> None:
        self._engine = engine
        self._tap = _tap(engine, requests, drafter_layers)
        self.batch = Batch()
        only_outputs = self._tap is not None and self._tap.rows == "outputs"
        n_outputs = 0
        for request in requests:
            first_output = n_outputs
            n_outputs += self._add_piece(request) if request.in_prefill else self._add_draft(request)
            request.first_state = first_output if only_outputs else request.first_row

    def _add_piece(self, request: Request) -> int:
        """Add a chunk of the prompt. Returns the number of outputs."""
        begin, last = request.n_prefilled, len(request.prompt) - 1
        request.n_prefilled += request.n_entries
        n_outputs = 0
        for position, token in enumerate(request.prompt[begin : request.n_prefilled].tolist(), begin):
            output = request.options.max_tokens > 0 if position == last else request.scores_prompt
            self.batch.add(token, position, request.seq, output)
            n_outputs += output
        request.first_row = len(self.batch) - 1
        return n_outputs

    def _add_draft(self, request: Request) -> int:
        """Add the newest token and the draft. Returns the number of outputs."""
        request.first_row = len(self.batch)
        self.batch.add(request.tokens[-1], request.position, request.seq, True)
        for i, token in enumerate(request.draft.tokens.tolist(), 1):
            self.batch.add(token, request.position + i, request.seq, True)
        return request.n_entries

    def decode(self) -> States | None:
        """Decode the batch. Returns the states of the tapped rows; None if none are needed."""
        if self._tap is None:
            self._engine.decode(self.batch)
            return None
        with self._tap:
            self._engine.decode(self.batch)
        return self._tap.states


def _tap(
    engine: EngineContext, requests: Sequence[Request], drafter_layers: tuple[LayerId, ...]
) -> Tap | None:
    """The tap for a pass: the layers that the drafter or the requests need. None without any."""
    wanting = [request for request in requests if request.wants_states]
    layers = dict.fromkeys(drafter_layers)
    for request in wanting:
        layers |= dict.fromkeys(request.options.layers)
    if not layers:
        return None
    # After prefill all rows that are needed are outputs.
    all_rows = len(drafter_layers) > 0 or any(request.in_prefill for request in wanting)
    return Tap(engine, Capture(tuple(layers), "all" if all_rows else "outputs", "float32"))
