"""Generation: continuous batching of texts in one context, with or without a drafter."""
