"""Training drafting heads (EAGLE-3, MTP) on a target's states, with PyTorch (``llamatap[train]``)."""
