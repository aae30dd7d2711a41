"""Reading rows from files: JSON lines, Parquet, and folders that Hugging Face ``datasets`` saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from llamatap._extras import needs
from llamatap.errors import InvalidInputError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["COLUMNS", "Row", "import_pyarrow", "read_rows"]

#: Columns that are read; others are ignored.
COLUMNS = ("input_ids", "loss_mask", "messages", "conversations", "text", "tools")

#: A row, or the error that reading it raised.
Row: TypeAlias = "Mapping[str, Any] | InvalidInputError"


def read_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a file or folder, in order.

    Takes ``*.jsonl`` (or ``*.json``; one JSON object per line, blank lines are ignored), ``*.parquet``, a
    folder saved by ``Dataset.save_to_disk``, or a folder of such files, read in the order of their names.

    :raises InvalidInputError: it is none of these. (A line that cannot be read is yielded as an error.)
    :raises MissingPackageError: pyarrow is needed and not installed.
    :raises OSError: it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(f"no such file: {path}")
    if not path.is_dir():
        return _reader(path)(path)
    if (path / "state.json").is_file():
        return _saved_rows(path)
    if (path / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        raise InvalidInputError(
            f"{path} holds splits ({', '.join(splits) or 'none'}): give the folder of one of them"
        )
    files = sorted(
        file
        for file in path.iterdir()
        if file.suffix in _READERS and file.is_file() and not file.name.startswith(".")
    )
    if not files:
        raise InvalidInputError(
            f"{path} holds no {', '.join(_READERS)} files, and was not saved by Dataset.save_to_disk"
        )
    return (row for file in files for row in _READERS[file.suffix](file))


def _reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    try:
        return _READERS[path.suffix]
    except KeyError:
        raise InvalidInputError(
            f"{path}: the format is taken from the name, which must end in {', '.join(_READERS)}; "
            'a row of .jsonl is a line such as {"text": "Once upon a time"}'
        ) from None


def import_pyarrow() -> Any:
    """The pyarrow package.

    :raises MissingPackageError: it is not installed.
    """
    with needs("dataset"):
        import pyarrow
    return pyarrow


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(line, number)


def _parsed(line: bytes, number: int) -> Row:
    try:
        row = json.loads(line)
    # Deep nesting raises RecursionError.
    except (ValueError, RecursionError) as error:
        return InvalidInputError(f"line {number} is not JSON: {error}")
    if not isinstance(row, dict):
        return InvalidInputError(f"line {number}: expected a JSON object, found {type(row).__name__}")
    return row


def _parquet_rows(path: Path) -> Iterator[Row]:
    pyarrow = import_pyarrow()
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            chosen = [name for name in COLUMNS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=256, columns=chosen):
                yield from _without_nulls(batch)
    except (pyarrow.ArrowException, ValueError) as error:
        raise InvalidInputError(f"{path} is not a Parquet file: {error}") from error


def _saved_rows(folder: Path) -> Iterator[Row]:
    """Rows of a folder that ``Dataset.save_to_disk`` wrote: Arrow streams, listed in ``state.json``."""
    pyarrow = import_pyarrow()
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidInputError(f"{folder / 'state.json'} names no data files: {error!r}") from error
    for file in files:
        yield from _arrow_rows(pyarrow, file)


def _arrow_rows(pyarrow: Any, path: Path) -> Iterator[Row]:
    try:
        with pyarrow.memory_map(str(path)) as memory, pyarrow.ipc.open_stream(memory) as stream:
            for batch in stream:
                chosen = [name for name in COLUMNS if name in batch.schema.names]
                yield from _without_nulls(batch.select(chosen))
    except (pyarrow.ArrowException, ValueError) as error:
        raise InvalidInputError(f"{path} is not an Arrow stream: {error}") from error


def _without_nulls(batch: pyarrow.RecordBatch) -> Iterable[Row]:
    """Rows of a batch without null fields: Arrow fills absent fields with nulls, and templates test presence.

    :raises ValueError: the batch is corrupt, e.g. with offsets outside its buffers.
    """
    batch.validate(full=True)
    for start in range(0, batch.num_rows, 64):
        for row in batch.slice(start, 64).to_pylist():
            found: dict[str, Any] = _drop_nulls(row)
            yield found


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_drop_nulls(entry) for entry in value]
    return value


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}
