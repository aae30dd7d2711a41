"""The file of a prompt's states that a completion writes for a trainer of drafters."""

from __future__ import annotations

from pathlib import Path

from llamatap.generation.results import Generation
from llamatap.model import Model
from llamatap.serve.completions.returned_states import check_finite
from llamatap.serve.payload import bytes_of
from llamatap.serve.verifier import VerifierFiles

__all__ = ["VerifierFile"]


class VerifierFile:
    """The file of one request.

    :param n_tokens: tokens of the prompt.
    :ivar layers: the layers in the file.
    :ivar n_bytes: maximum memory of the states until the file is written.
    :raises ApiError: 503, there is no room for the file.
    """

    def __init__(self, files: VerifierFiles, model: Model, n_tokens: int) -> None:
        self._files = files
        self.layers = files.layers(model)
        width = len(self.layers) * model.n_embd
        # Checked again when the file is written; a refusal is cheaper now.
        files.check_room(n_tokens, width)
        self.n_bytes = bytes_of(n_tokens * width, 4, "safetensors")

    def write(self, found: Generation) -> Path:
        """Write the file.

        :raises ApiError: 422, the states contain NaN or infinity; 503, there is no room, or the folder is
            gone.
        """
        assert found.prompt_states is not None
        states = found.prompt_states.select(self.layers)
        check_finite(states.array)
        return self._files.leave(states)
