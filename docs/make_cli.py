"""Write docs/reference/cli.md from the command line itself.

$ python docs/make_cli.py            writes the page
$ python docs/make_cli.py --check    fails if the page is not what would be written
"""  # noqa: INP001  (a script beside the pages it makes)

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncrpc.tools.cli.main import make_parser

PAGE: Final = Path(__file__).resolve().parent / "reference" / "cli.md"
_HEAD: Final = (
    "# Command line\n\n"
    "Made from the command line itself by `docs/make_cli.py`; `asyncrpc VERB "
    "--help` says the same.\n\n"
    "The verbs that look at a running group (`status`, `top`, `calls`, "
    "`refs`, `stacks`, `why`, `timeline`, `dump`, `torch-dump`, `doctor`) take "
    "the address of any of its workers, or `--run`, or `$ASYNCRPC_ADDRESS`; "
    "without any of these they take your only run of `asyncrpc run` on this "
    "host, found by its [run "
    "directory](../how-to/start-workers.md#the-run-directory). They connect as "
    "observers: with the secret of the run, or else with that of the group by "
    "[the same variables](environment.md) as a worker, joining nothing and "
    "changing nothing. `--worker` asks only some workers, `--json` writes JSON. "
    "Their exit status is 0 if all is well, 1 if not (a worker gives no "
    "answer, a wait takes too long), and 2 if the command was wrong or no "
    "worker could be reached. Tables fit the terminal, or 80 columns without "
    "one; cut cells end in `…`, a line on the standard error reports this, and "
    "`--json` shows everything. Items that a worker left out are counted.\n"
)


def page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_verbs(make_parser())])


def _verbs(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:  # noqa: SLF001  (argparse has no other way)
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, verb in action.choices.items():
                yield f"## asyncrpc {name}\n\n{verb.description}\n"
                yield from _verb(verb)


def _verb(verb: argparse.ArgumentParser) -> Iterator[str]:
    rows = [
        (_shown(action), _told(action))
        for action in verb._actions  # noqa: SLF001
        if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))  # noqa: SLF001
    ]
    if rows:
        yield "| argument | what it does |\n| --- | --- |"
        yield from (f"| {name} | {told} |" for name, told in rows)
        yield ""
    for action in verb._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, inner in action.choices.items():
                yield f"### {verb.prog} {name}\n\n{inner.description or ''}\n"
                yield from _verb(inner)


def _shown(action: argparse.Action) -> str:
    metavar = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
    )
    value = "" if action.nargs == 0 else str(metavar or action.dest.upper())
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(
        f"`{name} {value}`".replace(" `", "`") for name in action.option_strings
    )


def _told(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default, "prog": "asyncrpc"}
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Write the page, or check it; return the exit status."""
    made = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made)
        return 0
    if PAGE.exists() and PAGE.read_text() == made:
        return 0
    sys.exit(f"{PAGE} is not what docs/make_cli.py writes; run it")


if __name__ == "__main__":
    sys.exit(main())
