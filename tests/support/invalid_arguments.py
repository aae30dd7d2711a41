"""Calls of :func:`llamatap.generate` whose arguments are wrong, by what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.generation import PROMPT, CheckedContext

import llamatap
from llamatap._native import native_of

#: Untyped, for what a type checker would refuse.
lt: Any = llamatap

NAN, INF = float("nan"), float("inf")


def with_options(**wrong: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: lt.generate(c.context, PROMPT, **{"max_tokens": 3, **wrong})


def with_prompts(wrong: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: lt.generate(c.context, wrong, max_tokens=3)


def with_drafter(wrong: Any) -> Callable[[CheckedContext], Any]:
    return lambda c: lt.generate(c.context, PROMPT, wrong, max_tokens=3)


INVALID: dict[str, Callable[[CheckedContext], Any]] = {
    "a path for a model": lambda c: lt.generate(c.model.path, PROMPT),
    "None for a model": lambda c: lt.generate(None, PROMPT),
    "the core's context": lambda c: lt.generate(native_of(c.context), PROMPT),
    "an extractor": lambda c: lt.generate(lt.Extractor(c.model), PROMPT),
    "prompts: None": with_prompts(None),
    "prompts: a number": with_prompts(5),
    "prompts: none": with_prompts([]),
    "prompts: bytes": with_prompts(b"abc"),
    "prompts: a generator": with_prompts(x for x in [[5]]),
    "prompts: an array of two dimensions": with_prompts(np.zeros((2, 3), np.int32)),
    "prompts: an empty text": with_prompts(""),
    "prompts: an empty one": with_prompts([[5], []]),
    "prompts: floats": with_prompts([5.0, 6.0]),
    "prompts: bools": with_prompts([True, False]),
    "prompts: a token beyond the vocabulary": with_prompts([5, 259]),
    "prompts: a negative token": with_prompts([[5], [-1]]),
    "prompts: a dict": with_prompts({5: 6}),
    "prompts: a text and a number": with_prompts(["a", 5]),
    "max_tokens: 0": with_options(max_tokens=0),
    "max_tokens: negative": with_options(max_tokens=-1),
    "max_tokens: a float": with_options(max_tokens=3.0),
    "max_tokens: None": with_options(max_tokens=None),
    "max_tokens: a bool": with_options(max_tokens=True),
    "max_tokens: beyond 32 bits": with_options(max_tokens=2**31),
    "temperature: negative": with_options(temperature=-0.1),
    "temperature: NaN": with_options(temperature=NAN),
    "temperature: infinite": with_options(temperature=INF),
    "temperature: None": with_options(temperature=None),
    "temperature: a text": with_options(temperature="1"),
    "top_k: negative": with_options(top_k=-1),
    "top_k: a float": with_options(top_k=1.5),
    "top_p: 0": with_options(top_p=0.0),
    "top_p: above 1": with_options(top_p=1.1),
    "min_p: negative": with_options(min_p=-0.1),
    "min_p: above 1": with_options(min_p=1.5),
    "repeat_penalty: 0": with_options(repeat_penalty=0.0),
    "repeat_penalty: NaN": with_options(repeat_penalty=NAN),
    "frequency_penalty: infinite": with_options(frequency_penalty=INF),
    "presence_penalty: a list": with_options(presence_penalty=[1.0]),
    "penalty_last_n: negative": with_options(penalty_last_n=-1, repeat_penalty=1.1),
    "penalty_last_n: a text": with_options(penalty_last_n="64"),
    "penalty_last_n: too many": with_options(penalty_last_n=2**21),
    "seed: negative": with_options(seed=-1),
    "seed: the engine's word for any": with_options(seed=2**32 - 1),
    "seed: a float": with_options(seed=1.0),
    "seed: a bool": with_options(seed=True),
    "stop: empty": with_options(stop=""),
    "stop: an empty one": with_options(stop=["a", ""]),
    "stop: bytes": with_options(stop=b"ab"),
    "stop: bytes in a list": with_options(stop=[b"ab"]),
    "stop: a number": with_options(stop=5),
    "stop: None": with_options(stop=None),
    "stop: tokens": with_options(stop=[5, 6]),
    "stop_tokens: a number": with_options(stop_tokens=5),
    "stop_tokens: None": with_options(stop_tokens=None),
    "stop_tokens: texts": with_options(stop_tokens=["a"]),
    "stop_tokens: negative": with_options(stop_tokens=[-1]),
    "stop_tokens: floats": with_options(stop_tokens=[5.0]),
    "stop_tokens: beyond 32 bits": with_options(stop_tokens=[2**31]),
    "stop_tokens: beyond the vocabulary": with_options(stop_tokens=[259]),
    "ignore_eos: a text": with_options(ignore_eos="no"),
    "ignore_eos: a number": with_options(ignore_eos=1),
    "logprobs: negative": with_options(logprobs=-1),
    "logprobs: a bool": with_options(logprobs=True),
    "logprobs: too many": with_options(logprobs=1025),
    "states: a bool": with_options(states=True),
    "states: another word": with_options(states="all"),
    "states: a list": with_options(states=["full"]),
    "states: an array": with_options(states=np.array(["full", "last"])),
    "layers: out of range": with_options(states="full", layers=[5]),
    "layers: without states": with_options(layers=[1]),
    "layers: a float": with_options(states="full", layers=1.0),
    "layers: another word": with_options(states="full", layers="last"),
    "rejection: a number": with_options(rejection=1),
    "stream: a number": with_options(stream=1),
    "drafter: a number": with_drafter(5),
    "drafter: a text": with_drafter("ngram"),
    "drafter: a path": with_drafter(Path("eagle3.gguf")),
    "drafter: a model among drafters": lambda c: lt.generate(c.context, PROMPT, [c.model]),
    "drafter: a class": with_drafter(llamatap.NGramDrafter),
    "drafter: no drafters": with_drafter([]),
    "drafter: None among drafters alone": with_drafter([None]),
    "drafter: a number among drafters": with_drafter([llamatap.NGramDrafter(), 5]),
    "drafter: a model": lambda c: lt.generate(c.context, PROMPT, c.model),
}
