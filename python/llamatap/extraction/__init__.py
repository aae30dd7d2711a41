"""Extraction: the hidden states of whole prompts at the layers asked for."""
