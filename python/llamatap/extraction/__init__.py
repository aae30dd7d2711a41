"""Extraction: the hidden states of whole prompts at the requested layers."""
