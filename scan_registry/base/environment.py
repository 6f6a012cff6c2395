"""What users say in environment variables."""

from __future__ import annotations

import os

from scan_registry.base.suggestion import accepted_words

#: Variables that turn something on, with words that do so beside ``_ON``.
FLAGS = {"SCAN_REGISTRY_LOG": ("info",), "SCAN_REGISTRY_DEBUG": ()}
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")


def check_flags() -> None:
    """``ValueError`` if one of ``FLAGS`` is set to a word that neither turns it on nor off."""
    for name in FLAGS:
        flag(name)


def flag(name: str) -> bool:
    """Whether a variable turns something on: it is set to 1, true, yes or on, or to a word of its own.

    ``ValueError`` if it is set to a word that neither turns it on nor off.
    """
    word = os.environ.get(name, "").strip().lower()
    if word in _OFF:
        return False
    also = FLAGS.get(name, ())
    if word in _ON or word in also:
        return True
    accepted = [*also, *_ON, *(off for off in _OFF if off)]
    raise ValueError(f"{name} is {os.environ[name]!r}; {accepted_words(word, accepted)}")
