from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, random_tokens, relative

import llamatap as lt

ALL: list[lt.LayerId] = [0, 1, 2, 3, 4, "norm"]


def whole(model: lt.Model, tokens: NDArray[np.int32]) -> lt.States:
    with lt.Extractor(model, **EXACT) as extractor:
        return extractor(tokens, ALL)


def test_logits_and_text_are_those_of_an_untapped_decode(smollm2: lt.Model) -> None:
    prompt = smollm2.tokenize("Once upon a time").tolist()

    def generate(layers: list[lt.LayerId] | None) -> tuple[list[int], list[NDArray[np.float32]]]:
        tokens: list[int] = []
        logits = []
        with smollm2.context(n_ctx=256) as context:
            batch = lt.Batch.of(prompt)
            position = len(prompt)
            while len(tokens) < 12:
                if layers is None:
                    context.decode(batch)
                else:
                    with context.tap(layers) as tap:
                        context.decode(batch)
                    assert tap.states.array.shape == (len(batch), len(layers), smollm2.n_embd)
                logits.append(context.logits())
                tokens.append(int(logits[-1].argmax()))
                batch = lt.Batch.of([tokens[-1]], pos0=position)
                position += 1
        return tokens, logits

    plain = generate(None)
    for layers in ([2, 15, 27], [0], list(range(30))):
        tapped = generate(list(layers))
        assert tapped[0] == plain[0]
        assert all(np.array_equal(a, b) for a, b in zip(tapped[1], plain[1], strict=True))
    # H_n of all rows takes the prompt in two engine calls: other kernels, the same text.
    tapped = generate([-1, "norm"])
    assert tapped[0] == plain[0]
    assert relative(tapped[1][-1], plain[1][-1]) < 2e-2


@pytest.mark.parametrize("outputs", [[], [29], [0], [3, 4, 20], list(range(30))])
@pytest.mark.parametrize("rows", ["all", "outputs"])
def test_rows_and_logits_whatever_the_outputs(
    tiny_model: lt.Model, rng: np.random.Generator, outputs: list[int], rows: str
) -> None:
    tokens = random_tokens(rng, tiny_model, 30)
    expected = whole(tiny_model, tokens)
    with tiny_model.context(n_ctx=256, n_ubatch=8, n_batch=16, **EXACT) as context:
        batch = lt.Batch()
        for position, token in enumerate(tokens):
            batch.add(int(token), position, output=position in outputs)
        with context.tap(ALL, rows=rows) as tap:  # type: ignore[arg-type]
            context.decode(batch)
        kept = list(range(30)) if rows == "all" else outputs
        assert tap.states.array.shape == (len(kept), 6, 64)
        assert tap.states.tokens.tolist() == tokens[kept].tolist()
        if kept:
            assert relative(tap.states.array, expected.array[kept]) < 1e-5
        untapped = tiny_model.context(n_ctx=256, **EXACT)
        untapped.decode(batch)
        for row in range(30):
            if row in outputs:
                assert relative(context.logits(row), untapped.logits(row)) < 1e-5
                assert np.array_equal(context.logits(row - 30), context.logits(row))
            else:
                with pytest.raises(lt.InvalidInputError, match="not an output"):
                    context.logits(row)
        # The KV cache is complete: later tokens are as after an untapped decode.
        for one in (context, untapped):
            one.decode(lt.Batch.of([7], pos0=30))
        assert relative(context.logits(), untapped.logits()) < 1e-5
        untapped.close()


@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("arrangement", ["blocks", "interleaved", "shuffled"])
@pytest.mark.parametrize("rows", ["all", "outputs"])
def test_several_sequences_come_back_in_batch_order(
    tiny_model: lt.Model, rng: np.random.Generator, kv_unified: bool, arrangement: str, rows: str
) -> None:
    prompts = [random_tokens(rng, tiny_model, length) for length in (11, 4, 23, 9)]
    entries = [(seq, position) for seq, prompt in enumerate(prompts) for position in range(len(prompt))]
    if arrangement == "interleaved":
        entries.sort(key=lambda entry: (entry[1], entry[0]))
    elif arrangement == "shuffled":
        entries = [entries[i] for i in rng.permutation(len(entries))]
    batch = lt.Batch()
    for seq, position in entries:
        last = position == len(prompts[seq]) - 1
        batch.add(int(prompts[seq][position]), position, seq, output=last or position == 2)
    with tiny_model.context(n_ctx=1024, n_seq_max=4, n_ubatch=16, kv_unified=kv_unified, **EXACT) as context:
        with context.tap(ALL, rows=rows) as tap:  # type: ignore[arg-type]
            context.decode(batch)
        expected = [whole(tiny_model, prompt).array for prompt in prompts]
        kept = [i for i in range(len(entries)) if rows == "all" or batch.outputs[i]]
        for row, index in enumerate(kept):
            seq, position = entries[index]
            assert relative(tap.states.array[row], expected[seq][position]) < 1e-5, (seq, position)
        for index, (seq, position) in enumerate(entries):
            if not batch.outputs[index]:
                continue
            with tiny_model.context(n_ctx=256, **EXACT) as alone:
                alone.decode(lt.Batch.of(prompts[seq][: position + 1].tolist()))
                assert relative(context.logits(index), alone.logits()) < 1e-5


def test_tokens_shared_by_sequences(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, tiny_model, 12)
    with tiny_model.context(n_ctx=256, n_seq_max=3, **EXACT) as context:
        batch = lt.Batch()
        for position, token in enumerate(tokens[:8]):
            batch.add(int(token), position, [0, 1])
        with context.tap(ALL) as tap:
            context.decode(batch)
            assert relative(tap.states.array, whole(tiny_model, tokens).array[:8]) < 1e-5
            context.decode(lt.Batch.of(tokens[8:].tolist(), seq=1, pos0=8))
            assert relative(tap.states.array, whole(tiny_model, tokens).array[8:]) < 1e-5


def test_arrays_of_earlier_decodes_stay(tiny_model: lt.Model, rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, tiny_model, 20)
    context = tiny_model.context(n_ctx=256, **EXACT)
    kept = []
    with context.tap([2, -1]) as tap:
        for position, token in enumerate(tokens):
            context.decode(lt.Batch.of([int(token)], pos0=position))
            kept.append(tap.states.array)
    context.close()
    del context
    expected = whole(tiny_model, tokens)
    assert relative(np.concatenate(kept)[:, 0], expected[2]) < 1e-5
    assert relative(np.concatenate(kept)[:, 1], expected[-1]) < 1e-5
    assert all(not array.flags.writeable and not array.flags.owndata for array in kept)


def test_wrong_taps(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=256) as context:
        wrong: list[Any] = [[], [9], ["post"]]
        for layers in wrong:
            with pytest.raises(lt.InvalidInputError), context.tap(layers):
                pass
        with pytest.raises(lt.InvalidInputError), context.tap([1], rows="some"):  # type: ignore[arg-type]
            pass
        with pytest.raises(lt.InvalidInputError), context.tap([1], dtype="int8"):
            pass
        with context.tap([1]) as tap:
            with pytest.raises(lt.InvalidInputError, match="nothing was decoded"):
                tap.states  # noqa: B018
            with pytest.raises(lt.InvalidInputError, match="open"), context.tap([2]):
                pass
            context.decode(lt.Batch.of([5]))
            with pytest.raises(lt.InvalidInputError):
                context.decode(lt.Batch.of([5], pos0=7))
            with pytest.raises(lt.InvalidInputError, match="nothing was decoded"):
                tap.states  # noqa: B018
        with context.tap([2]):
            pass


def test_tap_dtype_and_provenance(tiny_model: lt.Model) -> None:
    with tiny_model.context(n_ctx=256, **EXACT) as context, context.tap([1, "norm"], dtype="bfloat16") as tap:
        context.decode(lt.Batch.of([5, 6]))
        assert tap.states.array.dtype.name == "bfloat16"
        provenance = tap.states.provenance
        assert provenance["rows"] == "all"
        assert provenance["norm"] == ["pre", "post"]
        assert provenance["flash_attention"] is False
        assert provenance["type_k"] == "f32"
