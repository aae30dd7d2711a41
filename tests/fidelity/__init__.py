"""llamatap beside transformers, on the same weights."""
