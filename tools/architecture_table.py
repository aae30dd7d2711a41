"""The snapshot of every architecture (tests/data) and the table made of it (docs/architectures.md).

python tools/architecture_table.py            runs all checks anew, writes both
python tools/architecture_table.py --check    fails when the table is not of the snapshot
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import architecture_checks  # noqa: E402
from support.tiny_models.registry import FILES  # noqa: E402

TABLE = ROOT / "docs" / "architectures.md"
#: What entries of transformers' hidden_states are, by its version and class.
NUMBERS = ROOT / "tests" / "data" / "layer_numbers.json"

HEAD = """# Architectures

Made by `make architectures`, which runs the checks of tests/support/architecture_checks.py on the tiny random
models that the engine's own `test-llama-archs` writes, one or two for each architecture, and on files of our
own for the others. `make test` runs them again and fails when anything in these tables is no longer so.

`ok` says that all layers and norm(`H_n`) were the same in one piece and in chunks of 16 and of 1 token,
alone and in a ragged batch, extracted and tapped, with unified and with separate memory; that other
weights in block i change `H_{i+1}` and, to the bit, none of `H_0`..`H_i`; and that NumPy gives `H_0`
from the file's embeddings, norm(`H_n`) from `H_n`, and the logits from norm(`H_n`). *Nodes* are the
engine's own names for `H_0`, `H_1` and `H_n`, by operation where they have none. *Empty block* tells
whether a block whose weights are all zero hands its input on unchanged, to the bit: the state is then
the residual stream itself, neither normed nor scaled. *transformers* tells which states its `hidden_states`
are, seen with hooks on its blocks (tests/golden/make_layer_numbers.py); empty where no such class was run.

## Files of the engine's writer

"""

OWN_HEAD = """
## Files of our own

Of the architectures that the engine's program cannot write, tests/support/tiny_models writes files, and the
same checks are run on them, each in a process of its own. Encoders (those without a head) are computed at
once, and compared alone, batched, extracted and tapped; tests/python/extraction/test_encoders.py compares all
layers of most with NumPy. What cannot give states must say so and never abort.

"""

COLUMNS = """| arch | ok | nodes | `H_0` | empty block | final norm | head | transformers | remark |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""

POST_NORM = "post-norm: `H_i` is normed, and nothing is normed after the last block"
SEVERAL = "the engine mixes up several sequences: one at a time"

REMARKS = {
    "afmoe": "the engine always scales the embedding; transformers does with `mup_enabled`, which its "
    "AfmoeConfig leaves off: without it all states differ, with it they are the same",
    "arwkv7": SEVERAL,
    "bert": POST_NORM,
    "chameleon": "the engine hides image tokens in the first row of logits only",
    "dream": "no causal attention: a prompt is computed at once",
    "gemma4": "a block may end in a scale of the stream",
    "granitehybrid": "Bamba's converted files are wrong, not the engine: llama.cpp's converter reorders the "
    "rows of q and k over whole heads, of which half turns, and has all of each turn where config.json lacks "
    "`attn_rotary_emb`, as transformers writes it. A file written right gives transformers' states",
    "graniteswitch": "of tokens only: the engine aborts on embeddings in their place",
    "hrm_text": "the same blocks run several times; each run has a layer id",
    "jina-bert-v2": POST_NORM,
    "jina-bert-v3": POST_NORM,
    "kimi-k3": "`H_i` is the stream, though blocks attend to earlier ones too; `H_n` is what the norm reads",
    "llada": "no causal attention: a prompt is computed at once",
    "llada-moe": "no causal attention: a prompt is computed at once",
    "minimax-01": "a block adds to what its norm gives; `H_i` is what the norm reads; the engine aborts "
    "on several sequences where weights are of Q4_0 or Q4_K: one at a time",
    "nomic-bert": POST_NORM,
    "nomic-bert-moe": POST_NORM,
    "plamo2": SEVERAL,
    "rwkv6qwen2": SEVERAL,
    "rnd1": "no causal attention: a prompt is computed at once",
}


def numbers() -> dict[str, str]:
    """By architecture: the entries of transformers' hidden_states."""
    versions = json.loads(NUMBERS.read_text())
    newest = max(versions, key=lambda version: [int(part) for part in version.split(".")])
    found: dict[str, set[str]] = {}
    for entry in versions[newest].values():
        entries, n_layer = entry["entries"], entry["n_layer"]
        if "other" in entries:
            text = "`H_0`, and norm at the end; between them what leaves blocks"
        else:
            last = [] if entries[-1] != "norm" else [entries[-1]]
            end = entries[-1 - len(last)].replace(str(n_layer), "n").replace(str(n_layer - 1), "{n-1}")
            text = ", ".join([f"`{entries[0]}`..`{end}`", *last])
        found.setdefault(entry["arch"], set()).add(text)
    return {arch: "; ".join(sorted(texts)) for arch, texts in found.items()}


def rows(snapshot: dict[str, Any], names: list[str]) -> str:
    lines = []
    numbered = numbers()
    for name in names:
        found = snapshot[name]
        kind = " (MoE)" if name.endswith("-moe") and name.removesuffix("-moe") + "-dense" in snapshot else ""
        if "not loaded" in found:
            lines.append(f"| {name} | ModelLoadError | | | | | | | {found['not loaded']} |")
            continue
        arch = found["unsupported"].split(": ", 1)[0] if "unsupported" in found else found["arch"]
        if name in FILES and name != arch:
            kind = f" ({name.removeprefix(arch + '-')})"
        if "unsupported" in found:
            reason = found["unsupported"].split(": ", 1)[1]
            lines.append(
                f"| {arch}{kind} | UnsupportedError | | | | | | {numbered.get(arch, '')} | {reason} |"
            )
            continue
        nodes = ", ".join((found["nodes"][0], found["nodes"][1], found["nodes"][-2]))
        lines.append(
            f"| {arch}{kind} | ok | {nodes} | {found['first']} | "
            f"{'unchanged' if found['residual'] else '-'} | {found['norm']} | {found['head']} | "
            f"{numbered.get(found['arch'], '')} | {REMARKS.get(found['arch'], '')} |"
        )
    return COLUMNS + "\n".join(lines) + "\n"


def table(snapshot: dict[str, Any]) -> str:
    engine = sorted(name for name in snapshot if name not in FILES)
    own = sorted(name for name in snapshot if name in FILES)
    return HEAD + rows(snapshot, engine) + OWN_HEAD + rows(snapshot, own)


def main() -> None:
    parser = argparse.ArgumentParser(description="The snapshot and the table of architectures.")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        if TABLE.read_text() != table(json.loads(architecture_checks.SNAPSHOT_PATH.read_text())):
            sys.exit(f"{TABLE} is not of the snapshot: run make architectures")
        return
    snapshot = {}
    with architecture_checks.written_models() as folder:
        for path in sorted(folder.glob("*.gguf")):
            if path.stem == "changed":
                continue
            snapshot[path.stem] = architecture_checks.entry(path, folder / "changed.gguf")
            print(path.stem, snapshot[path.stem].get("unsupported", "ok"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in sorted(FILES):
            path = FILES[name]().write(Path(folder) / f"{name}.gguf")
            snapshot[name] = architecture_checks.entry_of_child(path, Path(folder) / "changed")
            print(name, next(iter(snapshot[name].values())), flush=True)
    architecture_checks.SNAPSHOT_PATH.write_text(json.dumps(snapshot, indent=1) + "\n")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(snapshot))


if __name__ == "__main__":
    main()
