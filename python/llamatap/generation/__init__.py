"""Generation: continuous batching of texts in one context, with a drafter or without."""
