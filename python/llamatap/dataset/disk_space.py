"""Disk space: whether the rest of a data set fits."""

from __future__ import annotations

import errno

from llamatap.dataset.folder import DatasetFolder
from llamatap.dataset.layouts import Layout
from llamatap.dataset.options import DatasetOptions

__all__ = ["check_disk_space"]

# Token ids and loss masks in the files beside the states.
_BYTES_PER_TOKEN = 24


def check_disk_space(folder: DatasetFolder, layout: Layout, options: DatasetOptions) -> None:
    """Check that the missing part of a data set fits onto the disk, with the journal of computed batches.

    :raises OSError: it does not (``ENOSPC``); with both numbers.
    """
    samples = layout.samples
    free, block = folder.free_bytes()
    # Each file ends in part of a block.
    needed = layout.n_bytes() - layout.n_bytes_there()
    needed += int((~layout.written()).sum()) * block + _BYTES_PER_TOKEN * samples.n_tokens
    # Computed batches are on the disk twice until they are written.
    batch = max(options.batch_tokens, int(samples.lengths.max()))
    rows = min(options.queue * batch, samples.n_tokens)
    needed += rows * len(layout.columns) * layout.n_embd * layout.item_bytes
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the data set ({len(samples):,} samples, {samples.n_tokens:,} tokens) needs {needed:,} bytes "
            f"more, and {free:,} are free; free some, or take fewer layers or samples",
            str(folder.path),
        )
