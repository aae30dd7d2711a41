"""Any connector as a transfer of the speculators library, whose trainer then reads from it. Needs the extra
``llamatap[train]``."""

from __future__ import annotations

from typing import Any

import torch

from llamatap.connectors.base import Connector, Stored
from llamatap.train.pytorch import tensor_of

__all__ = ["SpeculatorsTransfer"]


class SpeculatorsTransfer:
    """For ``speculators.train.data.ArrowDataset(transfer=)``: what a connector reads, as PyTorch tensors in
    the same memory. Layers as speculators counts them, with H_n (-1) as the last.

    :param connector: where samples are put.
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
