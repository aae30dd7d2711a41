"""Loss masks of conversations: which tokens of a rendered conversation the assistant generates.

:mod:`~llamatap.dataset.masks.conversation_masker` is the entry point: it renders the messages with markers
(:mod:`~llamatap.dataset.masks.markers`), finds the assistant's turns
(:mod:`~llamatap.dataset.masks.assistant_turns`), leaves out empty thoughts that the template added
(:mod:`~llamatap.dataset.masks.empty_thoughts`), and maps the turns to tokens
(:mod:`~llamatap.dataset.masks.turn_masker`).
"""
