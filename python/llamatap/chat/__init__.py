"""Chats as prompts: templates, the messages that they read, and tokens that they write in vain."""
