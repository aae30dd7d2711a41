"""Chat templates of models: rendering Jinja2 in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from llamatap._validate import shown
from llamatap.chat.messages import adapt_messages
from llamatap.errors import InvalidInputError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

__all__ = ["GENERATION_END", "GENERATION_START", "free_variables", "messages_for", "render", "render_text"]

#: Variables whose values replace the tags ``{% generation %}`` and ``{% endgeneration %}``, which mark what
#: an assistant generates. A tag without its variable writes nothing.
GENERATION_START, GENERATION_END = "generation_start_", "generation_end_"


# Exceptions that a template's code may raise in the sandbox.
_FAILURES = (
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    MemoryError,
    RuntimeError,
    SyntaxError,
)


def _raise_exception(message: str) -> NoReturn:
    raise InvalidInputError(f"the chat template refuses these messages: {message}")


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment(keep_trailing_newline: bool = False) -> Environment:
    # Imported here: many uses of llamatap never render a template.
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  as its base declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

            def written(name: str) -> nodes.Node:
                return nodes.Output([nodes.Name(name, "load")]).set_lineno(line)

            return [written(GENERATION_START), *body, written(GENERATION_END)]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=keep_trailing_newline,
        extensions=[loopcontrols, Generation],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(16)
def _compiled(template: str, keep_trailing_newline: bool) -> Template:
    """Compile a template, which takes longer than to render it."""
    return _environment(keep_trailing_newline).from_string(template)


def _rendered(what: str, template: str, variables: Mapping[str, Any], keep_trailing_newline: bool) -> str:
    from jinja2 import TemplateError

    try:
        return _compiled(template, keep_trailing_newline).render(**variables)
    except InvalidInputError:
        raise
    except (TemplateError, *_FAILURES) as error:
        raise InvalidInputError(f"the {what} failed: {error}") from error


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Render a chat template.

    The environment is what transformers gives its templates: ``trim_blocks``, ``lstrip_blocks``, loop
    controls, ``{% generation %}``, ``raise_exception``, ``strftime_now`` and a plain ``tojson``. It is
    immutable and sandboxed: a template comes with a model file, from anywhere.

    Messages are first converted by :func:`messages_for`.

    :raises InvalidInputError: the template is broken or refuses the messages, there are none, or one is
        empty.
    """
    return _render(template, messages_for(template, messages), **variables)


def messages_for(template: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Convert messages to the form that a template reads: messages with tool calls get a content if it is
    null or missing, and arguments become a mapping, or JSON text if the template reads only that.

    :raises InvalidInputError: they are not messages, there are none, or one is empty.
    """
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise InvalidInputError(
            f'messages must be a list of {{"role": ..., "content": ...}}, not {shown(messages)}'
        )
    try:
        return adapt_messages(template, messages, _render_with_tools)
    except RecursionError:
        raise InvalidInputError("a message is nested too deeply") from None


def _render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    copies = [dict(message) for message in messages]
    return _rendered("chat template", template, {"messages": copies, **variables}, False)


def _render_with_tools(template: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Render messages with tool calls, to find out what the template reads of them."""
    function = {
        "name": messages[1]["tool_calls"][0]["function"]["name"],
        "description": "Does it.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    }
    return _render(
        template,
        messages,
        tools=[{"type": "function", "function": function}],
        bos_token="<s>",
        eos_token="</s>",
        add_generation_prompt=False,
    )


def render_text(template: str, **variables: Any) -> str:
    """Render a template of plain text, in the same sandbox; a newline at its end stays.

    :raises InvalidInputError: the template is broken, or fails.
    """
    return _rendered("template", template, variables, True)


def free_variables(template: str) -> set[str]:
    """The names of the variables that a template expects.

    :raises InvalidInputError: the template is broken.
    """
    from jinja2 import TemplateError
    from jinja2.meta import find_undeclared_variables

    environment = _environment()
    try:
        found = find_undeclared_variables(environment.parse(template))
        return found - set(environment.globals) - {GENERATION_START, GENERATION_END}
    except (TemplateError, *_FAILURES) as error:
        raise InvalidInputError(f"the template is broken: {error}") from error
