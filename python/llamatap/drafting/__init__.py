"""Drafting: drafters, the speculative context of model drafters, and the length of drafts."""
