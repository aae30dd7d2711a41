"""How fast does co-training adapt a drafter to another kind of text?

A session of eight texts at once, with prompts that ask for SQL alone, drafts with a drafter that was trained
on the model's own chats, while ``llamatap cotrain`` retrains it. Informational: it prints tokens per round
over time, and leaves the log and the plot in the folder. For one core each:

    taskset -c 0,1 python bench/cotraining.py FOLDER --draft eagle3-q8_0.gguf --minutes 20
"""

from __future__ import annotations

import argparse
import random
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import llamatap as lt
from llamatap.fetch import fetch
from llamatap.train import CoTrainer, CoTrainOptions
from llamatap.train.cotrain.event_log import read_events

THINGS = (
    *("users", "orders", "books", "cars", "cities", "students", "movies", "songs", "fruits", "tools", "toys"),
    *("phones", "shirts", "games", "plants", "animals", "rivers", "teams", "hotels", "courses", "recipes"),
    *("employees", "products", "invoices", "patients", "flights", "trains", "schools", "pets", "planets"),
    *("museums", "bridges", "lakes", "wines", "coins", "stamps", "paintings", "concerts", "players", "cafes"),
)


def prompts(rng: random.Random) -> Iterator[str]:
    """Questions of the other kind, without end."""
    while True:
        thing, n = rng.choice(THINGS), rng.randint(4, 20)
        yield f"Write SQL statements that create a table of {thing} and insert {n} rows. Only SQL."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="what the trainer begins with (default: the draft)")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--python", type=Path, help="with PyTorch, for the trainer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--trainer", default="", help="arguments for llamatap cotrain, in one string")
    arguments = parser.parse_args()
    rng = random.Random(0)
    coming = prompts(rng)
    begin = ["--draft", str(arguments.checkpoint)] if arguments.checkpoint else []
    end = time.monotonic() + 60 * arguments.minutes
    n_tokens = 0
    with (
        lt.Model(fetch("smollm2"), weights="bf16") as model,
        model.context(n_ctx=4096, n_seq_max=8, n_threads=1) as context,
        CoTrainer(
            model,
            arguments.folder,
            arguments.draft,
            CoTrainOptions(),
            python=arguments.python,
            trainer_arguments=[*begin, "--threads", "1", *shlex.split(arguments.trainer)],
        ) as cotrainer,
    ):
        drafter = cotrainer.drafter(context, n_max=3)
        started = time.monotonic()
        with lt.Session(context, drafter) as session:
            while time.monotonic() < end:
                while session.pending < 9:
                    text = model.apply_chat_template([{"role": "user", "content": next(coming)}])
                    session.add(
                        text,
                        max_tokens=arguments.tokens,
                        temperature=arguments.temperature,
                        seed=rng.getrandbits(31),
                    )
                n_tokens += len(session.step())
        seconds = time.monotonic() - started
        print(f"{n_tokens} tokens in {seconds:.0f} s, {n_tokens / seconds:.1f} a second", cotrainer.dropped)
        drafter.close()
    report(arguments.folder, arguments.minutes)


def report(folder: Path, minutes: float) -> None:
    """Print tokens per round of the traffic in tenths of the time, and what was published."""
    events = read_events(folder / "log.jsonl")
    traffic = [one for one in events if one["event"] == "acceptance"]
    start, part = events[0]["time"], 6 * minutes
    for i in range(10):
        some = [one for one in traffic if i * part <= one["time"] - start < (i + 1) * part]
        if some:
            rounds = sum(one["rounds"] for one in some)
            mean = sum(one["rounds"] * one["tokens_per_round"] for one in some) / rounds
            print(f"{(i + 1) * part / 60:6.1f} min  {mean:.3f} tokens per round, {rounds} rounds")
    for one in events:
        if one["event"] in ("trained", "published", "swapped", "kept", "went back", "refused"):
            figures = {k: v for k, v in one.items() if k not in ("time", "side", "event")}
            print(f"{(one['time'] - start) / 60:6.1f} min  {one['event']}: {figures}")


if __name__ == "__main__":
    main()
