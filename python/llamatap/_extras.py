"""Packages that are installed with an extra: ``pip install "llamatap[server]"``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llamatap.errors import MissingPackageError

__all__ = ["EXTRAS", "missing", "needs"]

#: Extra that installs each package; the smallest one where several do.
EXTRAS = {
    "gguf": "convert",
    "matplotlib": "demo",
    "pyarrow": "dataset",
    "ray": "ray",
    "torch": "train",
}


def missing(*packages: str, extra: str | None = None, what: str | None = None) -> MissingPackageError:
    """The error that says which packages are missing and how to install them.

    :param extra: the extra that installs them; None looks it up in :data:`EXTRAS`.
    :param what: the feature that needs them.
    """
    extras = ",".join(dict.fromkeys(extra or EXTRAS[package] for package in packages))
    names = " and ".join(packages)
    said = f"{what} needs {names}" if what else f"{names} {'is' if len(packages) == 1 else 'are'} missing"
    return MissingPackageError(f'{said}: pip install "llamatap[{extras}]"')


@contextlib.contextmanager
def needs(extra: str, what: str | None = None) -> Iterator[None]:
    """Context manager around imports of packages that an extra installs.

    :param what: the feature that needs them.
    :raises MissingPackageError: one is missing; with the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing((error.name or "a package").partition(".")[0], extra=extra, what=what) from error
