"""A drafting loop by hand: EAGLE-3 on the low-level calls. It gives the same tokens as lt.generate.

python examples/own_loop.py TARGET.gguf EAGLE3.gguf "Once upon a time"
"""

from __future__ import annotations

import sys

import llamatap as lt


def generate(
    context: lt.Context, spec: lt.SpeculativeContext, prompt: list[int], n_tokens: int, n_draft: int = 3
) -> list[int]:
    """Continue the prompt with the n_tokens most likely tokens (greedy decoding)."""
    tokens = list(prompt)
    with context.tap(spec.target_layers) as tap:
        context.decode(lt.Batch.of(tokens))
        # The features of a token are its states of all target layers, side by side.
        states = spec.encode(tap.states.array.reshape(len(tokens), -1))
        # The pair at position p is (token[p+1], state[p]); the last state waits for its token.
        spec.decode(tokens[1:], states[:-1], range(len(tokens) - 1), outputs=False)
        tokens.append(int(context.logits().argmax()))
        waiting = states[-1:]
        while len(tokens) < len(prompt) + n_tokens:
            newest = len(tokens) - 1  # its position; the target has decoded all before it
            draft: list[int] = []
            token, state = tokens[-1], waiting
            for i in range(n_draft):
                step = spec.decode([token], state, [newest - 1 + i])
                assert step.states is not None
                token, state = int(step.ids[0, 0]), step.states
                draft.append(token)

            batch = lt.Batch()
            for i, token in enumerate([tokens[-1], *draft]):
                batch.add(token, newest + i, output=True)
            context.decode(batch)
            best = [int(context.logits(row).argmax()) for row in range(len(batch))]
            n_accepted = next((i for i, token in enumerate(draft) if token != best[i]), n_draft)

            # Rejected tokens are rolled back; accepted ones are decoded again with the target's own states.
            states = spec.encode(tap.states.array.reshape(len(batch), -1))
            context.memory.remove(0, newest + 1 + n_accepted)
            spec.memory.remove(0, newest)
            positions = range(newest, newest + n_accepted)
            spec.decode(draft[:n_accepted], states[:n_accepted], positions, outputs=False)
            waiting = states[n_accepted : n_accepted + 1]
            tokens += best[: n_accepted + 1]
    return tokens[len(prompt) :][:n_tokens]


if __name__ == "__main__":
    with lt.Model(sys.argv[1]) as model, model.context(n_ctx=2048) as own:
        beside = lt.SpeculativeContext(own, sys.argv[2])
        if beside.kind != "eagle3":
            sys.exit(f"this loop drafts with EAGLE-3 files; {sys.argv[2]} is a file of kind {beside.kind}")
        print(model.detokenize(generate(own, beside, model.tokenize(sys.argv[3]).tolist(), 64)))
