"""Chats as prompts: rendering templates, adapting messages, finding control tokens that a file does not
mark."""
