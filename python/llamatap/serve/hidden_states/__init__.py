"""``POST /v1/hidden_states``: the states of prompts."""
