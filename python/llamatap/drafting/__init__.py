"""Drafting: drafters, the speculative context that model drafters work in, and how long a draft is."""
