"""Stories: cases of a machine as text, each a title and the steps under it.

    kept borrow is registered:
        borrow lender 7; settle lender 7 = register; state = REGISTERING
        borrow lender 8 ! local taken

A step is an action with its arguments. `=` says all effects that it has, or the text
that it returns; without it there is no effect. `!` says its error, and a part of the
text of the error. What stands after `#` is a comment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import pytest


def cases(text: str) -> pytest.MarkDecorator:
    """Parametrize a test by `steps`: those of each story, its title as the id."""
    stories: dict[str, list[str]] = {}
    title = ""
    for line in re.sub(r"\s*#.*", "", text).splitlines():
        if line.startswith(" "):
            stories[title] += [step.strip() for step in line.split(";") if step.strip()]
        elif title := line.strip().rstrip(":"):
            assert title not in stories, f"there are two: {title}"
            stories[title] = []
    return pytest.mark.parametrize("steps", list(stories.values()), ids=list(stories))


Actions: TypeAlias = Mapping[str, Callable[..., Any]]


def value_of(word: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


class Words(NamedTuple):
    """What the words of stories mean: `name:value` is a keyword, others stand in order.

    Attributes:
        subject: the first argument of all that names none of its type; None: there is
            no such argument.
        names: arguments that are no numbers and no texts.
        effects: makes each effect.
        errors: types of errors.
    """

    subject: object = None
    names: Mapping[str, object] = MappingProxyType({})
    effects: Actions = MappingProxyType({})
    errors: Mapping[str, type[Exception]] = MappingProxyType({})

    def read(self, text: str, makers: Actions) -> Any:
        """Call one of the makers with the arguments after its name."""
        name, *words = text.split()
        options = dict(word.split(":") for word in words if ":" in word)
        args = [
            self.names[word] if word in self.names else value_of(word)
            for word in words
            if ":" not in word
        ]
        if self.subject is not None:
            args.sort(key=lambda arg: type(arg) is not type(self.subject))
            if not args or type(args[0]) is not type(self.subject):
                args.insert(0, self.subject)
        return makers[name](*args, **{key: value_of(options[key]) for key in options})

    def play(self, steps: Iterable[str], actions: Actions) -> None:
        for step in steps:
            action, mark, outcome = re.split(r"\s*([=!]|$)\s*", step, maxsplit=1)
            if mark == "!":
                kind, match = outcome.split(maxsplit=1)
                with pytest.raises(self.errors[kind], match=match):
                    self.read(action, actions)
                continue
            result = self.read(action, actions)
            if isinstance(result, str | int | float):
                assert str(result) == outcome, step
            else:
                effects = [
                    self.read(effect, self.effects)
                    for effect in outcome.split(",")
                    if effect
                ]
                assert list(result or []) == effects, step
