"""The snapshot of every architecture (tests/data) and the table made of it (docs/architectures.md).

python tools/architecture_table.py            runs all checks anew, writes both
python tools/architecture_table.py --check    fails when the table is not of the snapshot
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "tests")]

import architectures  # noqa: E402

TABLE = ROOT / "docs" / "architectures.md"

HEAD = """# Architectures

Made by `make architectures`, which runs the checks of tests/python/architectures.py on the tiny random models
that the engine's own `test-llama-archs` writes, one or two for each architecture. `make test` runs them again
and fails when anything in this table is no longer so.

`ok` says that all layers and norm(`H_n`) were the same in one piece and in chunks of 16 and of 1 token,
alone and in a ragged batch, extracted and tapped, with unified and with separate memory; that other
weights in block i change `H_{i+1}` and, to the bit, none of `H_0`..`H_i`; and that NumPy gives `H_0`
from the file's embeddings, norm(`H_n`) from `H_n`, and the logits from norm(`H_n`). *Nodes* are the
engine's own names for `H_0`, `H_1` and `H_n`, by operation where they have none. *Empty block* tells
whether a block whose weights are all zero hands its input on unchanged, to the bit: the state is then
the residual stream itself, neither normed nor scaled.

| arch | ok | nodes | `H_0` | empty block | final norm | head | remark |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""

REMARKS = {
    "dream": "no causal attention: a prompt is computed at once",
    "hrm_text": "the same blocks run several times; each run has a layer id",
    "kimi-k3": "`H_i` is the stream, though blocks attend to earlier ones too; `H_n` is what the norm reads",
    "llada": "no causal attention: a prompt is computed at once",
    "llada-moe": "no causal attention: a prompt is computed at once",
    "minimax-01": "a block adds to what its norm gives; `H_i` is what the norm reads",
    "plamo2": "the engine mixes up several sequences: one at a time",
    "rnd1": "no causal attention: a prompt is computed at once",
}


def table(snapshot: dict[str, Any]) -> str:
    lines = []
    for name, found in sorted(snapshot.items()):
        kind = " (MoE)" if name.endswith("-moe") and name.removesuffix("-moe") + "-dense" in snapshot else ""
        if "unsupported" in found:
            arch, reason = found["unsupported"].split(": ", 1)
            lines.append(f"| {arch}{kind} | UnsupportedError | | | | | | {reason} |")
            continue
        nodes = ", ".join((found["nodes"][0], found["nodes"][1], found["nodes"][-2]))
        lines.append(
            f"| {found['arch']}{kind} | ok | {nodes} | {found['first']} | "
            f"{'unchanged' if found['residual'] else '-'} | {found['norm']} | {found['head']} | "
            f"{REMARKS.get(found['arch'], '')} |"
        )
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="The snapshot and the table of architectures.")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        if TABLE.read_text() != table(json.loads(architectures.SNAPSHOT.read_text())):
            sys.exit(f"{TABLE} is not of the snapshot: run make architectures")
        return
    snapshot = {}
    with architectures.written_models() as folder:
        for path in sorted(folder.glob("*.gguf")):
            if path.stem == "changed":
                continue
            snapshot[path.stem] = architectures.entry(path, folder / "changed.gguf")
            print(path.stem, snapshot[path.stem].get("unsupported", "ok"), flush=True)
    architectures.SNAPSHOT.write_text(json.dumps(snapshot, indent=1) + "\n")
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(snapshot))


if __name__ == "__main__":
    main()
