"""Preset: template, length, layers and rows that a pipeline encodes prompts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamatap._validate import instance, integer, shown
from llamatap.chat import template as chat_templates
from llamatap.context import Context
from llamatap.errors import InvalidInputError
from llamatap.extraction.api import extract
from llamatap.extraction.extractor import Extractor
from llamatap.extraction.inputs import Window, prompt_tokens, window_bounds, window_text
from llamatap.layers import LayerId, translate, translate_for
from llamatap.loaded_model import LoadedModel
from llamatap.states import States

__all__ = ["Preset"]

# Variables of templates that are set elsewhere.
_TAKEN = ("messages", "self", "template")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe for encoding prompts: prompt to text, text to states.

    :ivar name: the name in messages and in the provenance of states.
    :ivar convention: the numbering of ``layers``, a name of :mod:`llamatap.layers`.
    :ivar layers: layer ids in that numbering.
    :ivar description: the use of the preset, in a sentence.
    :ivar source: the origin of the recipe.
    :ivar model_name: the name of the model that the preset is made for.
    :ivar architecture: ``general.architecture`` of that model; None: any.
    :ivar n_layer: its number of blocks; None: any.
    :ivar n_embd: its width; None: any.
    :ivar template: a Jinja template with the variable ``prompt``. None: the model's own chat template, with
        the prompt as the user's message, and a generation prompt.
    :ivar template_variables: variables for the model's own chat template, e.g. ``enable_thinking``.
    :ivar max_length: maximum number of tokens of the whole text; longer texts are truncated on the right.
        None: no limit.
    :ivar rows: positions [start, stop) to keep, as a slice; None: all of them.
    :raises InvalidInputError: a value is wrong, or they contradict each other.
    """

    name: str
    convention: str
    layers: tuple[LayerId, ...]
    description: str = ""
    source: str = ""
    model_name: str | None = None
    architecture: str | None = None
    n_layer: int | None = None
    n_embd: int | None = None
    template: str | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict, hash=False)
    max_length: int | None = None
    rows: Window | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise InvalidInputError(f"name must be a line of text, not {shown(self.name)}")
        if not self.layers:
            raise InvalidInputError("layers is empty; give at least one layer id")
        # Without n_layer, only the type and the sign of ids can be checked.
        translate(self.layers, source=self.convention, n_layer=self.n_layer or 2**20, arch=self.architecture)
        if self.max_length is not None:
            integer("max_length", self.max_length, 1)
        if self.rows is not None and _holds_nothing(self.rows, self.max_length):
            most = "" if self.max_length is None else f" of at most {self.max_length} tokens (max_length)"
            raise InvalidInputError(f'rows "{window_text(self.rows)}" keep no row of any text{most}')
        if self.template is not None:
            self._check_template(self.template)
        elif taken := [name for name in _TAKEN if name in self.template_variables]:
            raise InvalidInputError(f"template_variables must not set {', '.join(taken)}")

    def _check_template(self, template: str) -> None:
        if self.template_variables:
            raise InvalidInputError(
                "template_variables are for the model's own chat template; leave out template, or write "
                "their values into it"
            )
        names = chat_templates.free_variables(template)
        if "prompt" not in names:
            raise InvalidInputError("the template does not use the prompt; write {{ prompt }} where it goes")
        if others := names - {"prompt"}:
            raise InvalidInputError(
                f"the template uses {', '.join(sorted(others))}; the only variable it gets is prompt"
            )

    def check(self, model: LoadedModel) -> None:
        """Check that the model's shape is that of the model that the preset is made for.

        :raises InvalidInputError: architecture, depth or width differ; with what was expected and found.
        """
        instance("model", model, LoadedModel, "Model")
        shape = {"architecture": model.arch, "n_layer": model.n_layer, "n_embd": model.n_embd}
        if all(getattr(self, key) in (None, found) for key, found in shape.items()):
            return
        expected = _shape(self.architecture, self.n_layer, self.n_embd)
        found = _shape(model.arch, model.n_layer, model.n_embd)
        called = model.metadata.get("general.name") or "unnamed"
        wanted = self.model_name or "such a model"
        raise InvalidInputError(
            f"preset {self.name} is made for {self.model_name or 'a model'} ({expected}); "
            f"{model.path.name} ({called}) has {found}. Give a GGUF file of {wanted}"
        )

    def render(self, model: LoadedModel, prompt: str) -> str:
        """The text for the model: the template, filled with the unchanged prompt.

        :raises InvalidInputError: the prompt is not a text, or a template fails.
        :raises UnsupportedError: the preset uses the model's chat template, and the model has none.
        """
        instance("prompt", prompt, str)
        if self.template is not None:
            return chat_templates.render_text(self.template, prompt=prompt)
        return model.apply_chat_template([{"role": "user", "content": prompt}], **self.template_variables)

    def layer_ids(self, model: LoadedModel) -> list[LayerId]:
        """The layers in llamatap's numbering: 0..n or ``"norm"``.

        :raises InvalidInputError: the model has no such layer.
        :raises UnsupportedError: the model carries no single residual stream.
        """
        try:
            return translate_for(model, self.layers, source=self.convention)
        except InvalidInputError as error:
            raise InvalidInputError(f"preset {self.name}: {error}") from None

    def check_rows(self, n_tokens: int) -> None:
        """Check that the preset keeps at least one row of a text.

        :param n_tokens: the number of tokens of the text, after truncation.
        :raises InvalidInputError: it keeps none.
        """
        try:
            window_bounds(self.rows, n_tokens)
        except InvalidInputError:
            assert self.rows is not None
            raise InvalidInputError(
                f'preset {self.name} keeps the rows "{window_text(self.rows)}" of a text, but this one has '
                f"{n_tokens} token{'' if n_tokens == 1 else 's'}, including the template's: no row is left"
            ) from None

    @overload
    def encode(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self,
        model: LoadedModel | Context | Extractor,
        prompts: str,
        *,
        dtype: DTypeLike | str | None = ...,
    ) -> States: ...

    @overload
    def encode(
        self,
        model: LoadedModel | Context | Extractor,
        prompts: Sequence[str],
        *,
        dtype: DTypeLike | str | None = ...,
    ) -> list[States]: ...

    def encode(
        self,
        model: LoadedModel | Context | Extractor,
        prompts: str | Sequence[str],
        *,
        dtype: DTypeLike | str | None = None,
    ) -> States | list[States]:
        """The states of prompts: ``(n_tokens, n_layers, n_embd)`` each, without padding.

        :param model: a Model or a Context, as for :func:`llamatap.extract`, or an Extractor.
        :param prompts: a prompt, or a list of prompts, which gives a list.
        :param dtype: float32 (the default), float16 or bfloat16.
        :returns: states with ``preset`` and ``max_length`` in their provenance; :attr:`States.truncated`
            says whether the text was truncated.
        :raises InvalidInputError: the preset is made for another model, a prompt is not a text, or no row of
            it is left.
        :raises Error: what :meth:`render`, :meth:`layer_ids` and :func:`llamatap.extract` raise.
        """
        if not isinstance(model, (LoadedModel, Context, Extractor)):
            raise InvalidInputError(
                f"expected a Model, a Context or an Extractor, found {type(model).__name__}"
            )
        loaded = model if isinstance(model, LoadedModel) else model.model
        self.check(loaded)
        single = isinstance(prompts, str)
        if not single and (isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Sequence)):
            raise InvalidInputError(f"prompts must be a str or a list of them, not {type(prompts).__name__}")
        each = [prompts] if isinstance(prompts, str) else prompts
        layers = self.layer_ids(loaded)
        texts: list[NDArray[np.int32]] = []
        for index, prompt in enumerate(each):
            try:
                tokens = prompt_tokens(loaded, self.render(loaded, prompt), None)
                self.check_rows(len(tokens[: self.max_length]))
            except InvalidInputError as error:
                raise InvalidInputError(f"{'' if single else f'input {index}: '}{error}") from None
            texts.append(tokens)
        if isinstance(model, Extractor):
            found = model(texts, layers, dtype=dtype, max_length=self.max_length, window=self.rows)
        else:
            found = extract(model, texts, layers, dtype=dtype, max_length=self.max_length, window=self.rows)
        found = [states.with_details(preset=self.name) for states in found]
        return found[0] if single else found


def _holds_nothing(rows: Window, most: int | None) -> bool:
    """Whether a slice is empty for every length, up to ``most``."""
    start, stop = rows
    first = start or 0
    if most is not None and first >= most:
        return True
    if stop is None:
        return False
    return stop == 0 or (stop <= first and (first < 0) == (stop < 0))


def _shape(architecture: str | None, n_layer: int | None, n_embd: int | None) -> str:
    facts = (
        architecture,
        None if n_layer is None else f"{n_layer} layers",
        None if n_embd is None else f"width {n_embd}",
    )
    return ", ".join(fact for fact in facts if fact is not None)
