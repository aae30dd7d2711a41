"""Transfer for the speculators library: its trainer reads from any connector.

Needs the extra ``llamatap[train]``. ``python -m llamatap.connectors.speculators train
--hidden-states-backend llamatap ...`` is the command ``speculators train`` with connectors as a back end.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from llamatap._extras import needs
from llamatap.connectors import connect
from llamatap.connectors.connector import Connector, Stored
from llamatap.errors import InvalidInputError, UnsupportedError
from llamatap.train.pytorch import tensor_of

with needs("train", "llamatap.connectors.speculators"):
    import torch

__all__ = ["ConnectorBackend", "SpeculatorsTransfer", "register"]


class SpeculatorsTransfer:
    """Transfer for ``speculators.train.data.ArrowDataset(transfer=)``: reads samples from a connector, as
    PyTorch tensors without a copy. The layers must be those that speculators expects, H_n (-1) the last.

    :param connector: the connector to read from.
    """

    def __init__(self, connector: Connector) -> None:
        self.connector = connector

    def setup(self) -> None:
        """See :meth:`Connector.setup`."""
        self.connector.setup()

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """See :meth:`Connector.get_cached`."""
        return _tensors(self.connector.get_cached(file_idx))

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """See :meth:`Connector.get_generated`."""
        return _tensors(self.connector.get_generated(hs_transfer_params))

    def delete(self, handle: str) -> None:
        """See :meth:`Connector.delete`."""
        self.connector.delete(handle)


def _tensors(stored: Stored | None) -> dict[str, torch.Tensor] | None:
    return None if stored is None else {name: tensor_of(array) for name, array in stored.items()}


class ConnectorBackend:
    """Back end for ``hs_connectors.HiddenStatesBackend`` (0.9.0): the options of ``speculators train``, and
    the transfer made from them."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add ``--llamatap-connector`` and ``--llamatap-options``."""
        parser.add_argument(
            "--llamatap-connector",
            default="shared_memory",
            help="The connector's name. Used with backend=llamatap.",
        )
        parser.add_argument(
            "--llamatap-options",
            default="{}",
            help='The connector\'s options as JSON: \'{"name": "eagle3"}\'. Used with backend=llamatap.',
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add nothing: vLLM is not launched, because llamatap computes the states."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> SpeculatorsTransfer:
        """Make the transfer that the options ask for.

        :raises InvalidInputError: there is no such connector, or its options are wrong.
        """
        try:
            options = json.loads(args.llamatap_options)
            return SpeculatorsTransfer(connect(args.llamatap_connector, **options))
        except (TypeError, json.JSONDecodeError) as error:
            raise InvalidInputError(
                f"--llamatap-options must be the options of {args.llamatap_connector!r} as a JSON object; "
                f"found {args.llamatap_options!r}: {error}"
            ) from error

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Refuse: llamatap computes the states, not vLLM.

        :raises UnsupportedError: always.
        """
        raise UnsupportedError(
            "vLLM does not put states into llamatap's connectors, llamatap does: put them with a connector, "
            "and start speculators train without vLLM"
        )


def register() -> None:
    """Register connectors as the back end "llamatap" of ``speculators train``. A second call does nothing.

    :raises UnsupportedError: speculators is not installed, or ``speculators.train`` was imported before: it
        reads the options of the back ends on import.
    """
    try:
        from hs_connectors import HiddenStatesBackend
    except ImportError as error:
        raise UnsupportedError("needs speculators: pip install speculators") from error
    if "llamatap" in HiddenStatesBackend.registry:
        return
    if "speculators.train.config.resolution" in sys.modules:
        raise UnsupportedError(
            "register the back end before importing speculators.train, which reads its back ends on import"
        )
    HiddenStatesBackend.register("llamatap")(ConnectorBackend)


def main() -> None:
    """Run the command ``speculators`` with the back end."""
    register()
    from speculators.cli import app

    app()


if __name__ == "__main__":
    # Under its module name, so that a loader's workers can unpickle it.
    from llamatap.connectors.speculators import main as run

    run()
