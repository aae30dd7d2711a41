"""``/v1/completions`` and ``/v1/chat/completions``: text as OpenAI's API gives it."""
