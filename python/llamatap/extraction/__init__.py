"""Extraction: prompts in, the hidden states of the layers asked for out."""
