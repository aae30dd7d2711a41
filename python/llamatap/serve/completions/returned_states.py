"""The states of a text in its response (``return_hidden_states``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from llamatap import layers as layer_ids
from llamatap.generation.results import Generation
from llamatap.layers import LayerId
from llamatap.model import Model
from llamatap.serve.completions.schema import Sampling
from llamatap.serve.errors import ApiError
from llamatap.serve.payload import as_lists, bytes_of

__all__ = ["ReturnedStates", "check_finite"]


class ReturnedStates:
    """The states in a response: of the prompt and each token, or only of the last token.

    :ivar layer: normalised id of llamatap.
    :ivar full: whether states of all tokens are requested, or only the last one's.
    :raises InvalidInputError: the model has no such layer.
    """

    def __init__(self, model: Model, body: Sampling) -> None:
        #: As transformers counts.
        self.number = -1 if body.layer is None else body.layer
        self.full = body.return_hidden_states is True
        (found,) = layer_ids.translate_for(model, [self.number], source="transformers")
        self.layer: LayerId
        (self.layer,) = layer_ids.normalize(found, model.n_layer)
        self._n_embd = model.n_embd

    def check_size(self, n_rows: int, limit: int) -> None:
        """Check that states of ``n_rows`` tokens take at most ``limit`` bytes.

        :raises ApiError: 413, they take more.
        """
        if self.full and 4 * n_rows * self._n_embd > limit:
            raise ApiError(
                413,
                "invalid_request_error",
                "response_too_large",
                f"the states of {n_rows} tokens exceed {limit} bytes, the limit of this server for a "
                f"response: "
                "request the last token's, or a shorter text",
            )

    def n_bytes(self, n_rows: int) -> int:
        """Maximum memory of the states of ``n_rows`` tokens until they are sent."""
        return bytes_of(n_rows * self._n_embd, 4, "float") if self.full else 0

    def as_json(self, found: Generation) -> orjson.Fragment:
        """The field ``hidden_states`` of a choice: rows of the prompt and each token, or of the last token.

        :raises ApiError: 422, they contain NaN or infinity.
        """
        assert found.states is not None
        rows = found.states[self.layer]
        check_finite(rows)
        if not self.full:
            return orjson.Fragment(b"".join(as_lists(rows[-1])) if len(rows) else b"null")
        assert found.prompt_states is not None
        prompt = found.prompt_states[self.layer]
        check_finite(prompt)
        entries = [as_lists(prompt), *(as_lists(row) for row in rows)]
        return orjson.Fragment(b"[" + b",".join(b"".join(one) for one in entries) + b"]")

    def description(self, found: Generation) -> dict[str, Any]:
        """The fields that describe the states, as in ``/v1/hidden_states``."""
        assert found.states is not None
        provenance = found.states.select((self.layer,)).provenance
        of_extraction = ("window", "max_length", "pooling")
        return {
            "layer": self.number,
            "dtype": "float32",
            "provenance": {key: value for key, value in provenance.items() if key not in of_extraction},
        }


def check_finite(array: NDArray[Any]) -> None:
    """Check that states are finite.

    :raises ApiError: 422, they contain NaN or infinity.
    """
    if not np.isfinite(array).all():
        raise ApiError(
            422, "model_error", "not_finite", "the states contain NaN or infinity; see `llamatap info`"
        )
