"""Acceptance of several drafters from one pass over plain texts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from draft_figures import Counts, WatchedText, in_loops, right_tokens
from draft_setup import TEXT_DRAFTERS, Drafters, Row, asked, chat_context, questions

import llamatap as lt


class Watcher(lt.Drafter):
    """Asks several drafters after each token, notes their drafts, and lets the target decode without them."""

    def __init__(self, drafters: Mapping[str, lt.Drafter]) -> None:
        self.drafters = drafters
        self.target_layers = tuple(dict.fromkeys(i for one in drafters.values() for i in one.target_layers))
        self.draws = False
        #: By drafter and sequence: the draft after each token.
        self.drafts: dict[str, dict[int, list[list[int]]]] = {name: {} for name in drafters}
        self._ended: dict[int, dict[str, list[list[int]]]] = {}

    def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
        for one in self.drafters.values():
            one.process(batch, states.select(one.target_layers) if states and one.target_layers else None)

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> dict[int, lt.Draft]:
        for name, one in self.drafters.items():
            found = one.draft(requests)
            for seq in requests:
                draft = found[seq].tokens.tolist() if seq in found else []
                self.drafts[name].setdefault(seq, []).append(draft)
        return {}

    def accept(self, seq: int, n: int) -> None:
        for one in self.drafters.values():
            one.accept(seq, n)

    def reset(self, seq: int) -> None:
        for one in self.drafters.values():
            one.reset(seq)


def watched(
    context: lt.Context, drafters: Mapping[str, lt.Drafter], prompts: Sequence[list[int]], **options: Any
) -> list[tuple[list[int], dict[str, WatchedText]]]:
    """The texts after the prompts, with the drafts of every drafter after each token.

    As many prompts run at once as the context has sequences; prompt i of such a group is in sequence i.
    """
    results = []
    for begin in range(0, len(prompts), context.n_seq_max):
        watcher = Watcher(drafters)
        group = list(prompts[begin : begin + context.n_seq_max])
        for seq, found in enumerate(lt.generate(context, group, watcher, **options)):
            tokens = found.tokens.tolist()
            loops = in_loops(tokens)
            texts = {}
            for name in drafters:
                drafts = watcher.drafts[name].get(seq, [])
                # There is no request where no token would have fitted.
                drafts += [[]] * (len(tokens) - 1 - len(drafts))
                rest = [right_tokens(draft, tokens[i + 1 :]) for i, draft in enumerate(drafts)]
                texts[name] = WatchedText(rest[: max(len(tokens) - 1, 0)], loops)
            results.append((tokens, texts))
    return results


def acceptance(arguments: argparse.Namespace, label: str, model: lt.Model) -> list[Row]:
    rows: list[Row] = []
    numbers = [n for n in arguments.n_max if isinstance(n, int)]
    longest = max(numbers)
    with chat_context(arguments, model, 8) as context:
        drafters = Drafters(arguments, context)
        for temperature in arguments.temperatures:
            # A drafter's cache starts empty with each kind of sampling.
            made = {name: drafters.make(name, TEXT_DRAFTERS.get(name, longest)) for name in drafters.names}
            for file in ("own", "hand"):
                asked_for = questions(file, arguments.prompts)
                found = watched(
                    context,
                    made,
                    [asked(model, text) for _, text in asked_for],
                    max_tokens=arguments.tokens,
                    temperature=temperature,
                    seed=1,
                )
                kinds = dict.fromkeys([file, *(kind for kind, _ in asked_for)])
                for kind in kinds:
                    texts = [
                        one for one, (own, _) in zip(found, asked_for, strict=True) if kind in (file, own)
                    ]
                    n_tokens = sum(len(tokens) for tokens, _ in texts)
                    n_looping = sum(int(in_loops(tokens).sum()) for tokens, _ in texts)
                    for name in made:
                        own_length = TEXT_DRAFTERS.get(name)
                        for n_max in [*numbers, *([own_length] if own_length else [])]:
                            counts = Counts()
                            for _, drafts in texts:
                                counts.add(drafts[name], n_max)
                            rows.append(
                                {
                                    "target": label,
                                    "temperature": temperature,
                                    "prompts": kind,
                                    "drafter": name,
                                    "n_max": n_max,
                                    **counts.figures(),
                                    "generated tokens": n_tokens,
                                    "of them in loops": round(n_looping / max(n_tokens, 1), 3),
                                }
                            )
    return rows
