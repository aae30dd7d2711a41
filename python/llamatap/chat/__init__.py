"""Chats as prompts: rendering templates, adapting messages, finding tokens that files misdeclare."""
