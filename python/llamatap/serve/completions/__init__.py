"""``/v1/completions`` and ``/v1/chat/completions``: text generation as in OpenAI's API."""
