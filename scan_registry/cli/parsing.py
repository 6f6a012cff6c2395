"""Arguments of commands: an option is taken by its whole name, and what is unknown gets a suggestion."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from scan_registry.base.suggestion import suggestion
from scan_registry.cli.streams import complain

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    _SubParsers = argparse._SubParsersAction

PROGRAM = "scan-registry"
_ALONE = ("-h", "--help", "-V", "--version")  # options that end the program


class Parser(argparse.ArgumentParser):
    """argparse's parser, but it does not take shortened options, and an error is one line that says what to do."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})
        self.register("action", "parsers", Commands)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but nothing is left over: what is unknown is an error.

        Options before a command of this command's own, as in ``bench --bs 4 distributed``, are that one's.
        """
        words = self._without_own_name(list(args or ()))
        before, options = self._before_command(words)
        for option in options:
            if option not in self._option_string_actions:
                self.error(self._unknown(option))
        if before < len(words) and not {*options} <= {*_ALONE}:
            words = [words[before], *words[:before], *words[before + 1 :]]
        parsed, rest = super().parse_known_args(words, namespace)
        if rest:
            first = rest[0]
            self.error(
                self._unknown(first) if first.startswith("-") else f"{first!r} is one word too many"
            )
        return parsed, rest

    def _without_own_name(self, words: list[str]) -> list[str]:
        """The words without the first command's own name, as in ``bench linear_scan``, where ``bench`` alone means the same."""
        number, _ = self._before_command(words)
        if number == len(words) or words[number] not in self._own_names():
            return words
        rest = [*words[:number], *words[number + 1 :]]
        after, _ = self._before_command(rest)
        if after < len(rest):
            self.error(f"{words[number]!r} is one word too many before {rest[after]!r}")
        return rest

    def _own_names(self) -> set[str]:
        actions = [action for action in self._actions if isinstance(action, Commands)]
        return {action.own for action in actions if action.own is not None}

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith(("?", ".")) else "."
        complain(f"{PROGRAM}: error: {message}{end} See `{self.prog} --help`.")
        self.exit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that names no command, with the one that it may stand for."""
        if not isinstance(action, Commands):
            super()._check_value(action, value)
        elif value not in action.choices:
            names = [*([action.own] if action.own else []), *action.choices]
            guess = suggestion(value, names) or f"accepted are {', '.join(names)}"
            raise argparse.ArgumentError(None, f"{self.prog} has no command {value!r}; {guess}")

    def _before_command(self, words: Sequence[str]) -> tuple[int, list[str]]:
        """How many words there are before the first command, or in all, and the options among them."""
        commands = {
            name
            for action in self._actions
            if isinstance(action, Commands)
            for name in action.choices
        } | self._own_names()
        options, number = list[str](), 0
        while number < len(words):
            word = words[number]
            if word == "--" or word in commands:
                return (number if word in commands else len(words)), options
            if word.startswith("--"):
                name, valued, _ = word.partition("=")
                options.append(name)
                action = self._option_string_actions.get(name)
                if action is not None and action.nargs != 0 and not valued:
                    number += 1  # its value
            number += 1
        return len(words), options

    def _unknown(self, word: str) -> str:
        shown = [
            name
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
        ]
        guess = suggestion(word.partition("=")[0], shown)
        return f"{self.prog} has no option {word}{f'; {guess}' if guess else ''}"


class Commands(_SubParsers):
    """Commands by name. ``summaries`` are what a list of them says of each. ``own`` is a name of what is done without any of
    them; it may be given, and changes nothing."""

    summaries: Mapping[str, str] = {}
    own: str | None = None

    def add_parser(self, name: str, **settings: Any) -> argparse.ArgumentParser:
        if name in self.summaries:
            settings["help"] = self.summaries[name]
        return super().add_parser(name, **settings)
