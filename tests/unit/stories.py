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
from typing import Any, NamedTuple

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


class Words(NamedTuple):
    """What the words of stories mean.

    Attributes:
        subject: the first argument of all that names none of its type.
        names: arguments that are no numbers.
        effects: makes each effect.
        errors: types of errors.
    """

    subject: object
    names: Mapping[str, object]
    effects: Mapping[str, Callable[..., object]]
    errors: Mapping[str, type[Exception]]

    def read(self, text: str) -> tuple[str, list[Any]]:
        name, *words = text.split()
        args = [self.names[word] if word in self.names else int(word) for word in words]
        named = [arg for arg in args if type(arg) is type(self.subject)]
        rest = [arg for arg in args if type(arg) is not type(self.subject)]
        return name, [*(named or [self.subject]), *rest]

    def play(
        self, steps: Iterable[str], actions: Mapping[str, Callable[..., Any]]
    ) -> None:
        for step in steps:
            action, mark, outcome = re.fullmatch(r"([^=!]*)([=!]?)(.*)", step).groups()  # type: ignore[union-attr]
            name, args = self.read(action)
            if mark == "!":
                kind, match = outcome.split(maxsplit=1)
                with pytest.raises(self.errors[kind], match=match):
                    actions[name](*args)
                continue
            result = actions[name](*args)
            if isinstance(result, str | int):
                assert str(result) == outcome.strip(), step
            else:
                wanted = map(
                    self.read, filter(None, map(str.strip, outcome.split(",")))
                )
                effects = [self.effects[kind](*fields) for kind, fields in wanted]
                assert (result or []) == effects, step
