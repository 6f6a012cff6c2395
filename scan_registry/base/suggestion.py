"""What a mistyped word may stand for."""

from __future__ import annotations

from collections.abc import Sequence


def suggestion(word: str, accepted: Sequence[str]) -> str | None:
    """``did you mean --kernel?``, or None if nothing is like the word."""
    close = nearest(word, accepted)
    return f"did you mean {close}?" if close else None


def nearest(word: str, accepted: Sequence[str]) -> str | None:
    """The accepted word that is most like the word, or None if nothing is like it."""
    # Imported here, as only mistyped words need it.
    from difflib import get_close_matches

    shortened = [name for name in accepted if name.startswith(word)] if word.strip("-") else []
    close = [*shortened, *get_close_matches(word, accepted, 1, 0.7)]
    return close[0] if close else None


def accepted_words(word: str, accepted: Sequence[str]) -> str:
    """``accepted are cuda, triton``, and if one of these is like the word, the question whether it is meant."""
    guess = suggestion(word, accepted)
    return f"accepted are {', '.join(accepted)}{f'; {guess}' if guess else ''}"
