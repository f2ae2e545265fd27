"""Write a page for each public module from the docstrings of its public names.

    $ python docs/make_api.py build/docs/api

The public modules are those of the first table of docs/reference/api.md; the names in
their `__all__` are public.  The sources are parsed, not imported: the pages are the
same on every Python and torch, and need neither.
"""  # noqa: INP001  (a script beside the pages)

from __future__ import annotations

import ast
import functools
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, cast

ROOT: Final = Path(__file__).resolve().parent.parent
REFERENCE: Final = ROOT / "docs" / "reference"

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Definition: TypeAlias = Function | ast.ClassDef

_OVERVIEW: Final = (REFERENCE / "api.md").read_text("utf-8").partition("\n## ")[0]
# What a user may import.  A module's names are those of its `__all__`, in that order; a
# comment in it begins a group.
MODULES: Final = tuple(re.findall(r"^\| \[`([\w.]+)`\]", _OVERVIEW, re.MULTILINE))

# What the docstring of a method begins with that users do not call.
INTERNAL: Final = "Internal: "
# Bases of classes whose members the page lists.
ENUMS: Final = {"enum.Enum", "enum.IntEnum", "enum.StrEnum"}
# Special methods that users know a class by.
SPECIAL: Final = ("__aenter__", "__call__")

# Sections of a docstring that are lists of names; the others are prose.
LISTS: Final = ("Args", "Attributes", "Raises")
SECTIONS: Final = (
    *LISTS,
    "Returns",
    "Yields",
    "Cancellation",
    "Thread safety",
    "Example",
    "Source",
)
HEADING: Final = re.compile(rf"^({'|'.join(SECTIONS)}):(?: +(\S.*))?$")
ITEM: Final = re.compile(r"^(\*{0,2}[\w.]+(?:, \w+)*): +(.*)$", re.DOTALL)
SIGNATURE_COLUMNS: Final = 80


@dataclass(frozen=True)
class Named:
    """A public name and the definitions behind it: several if it is overloaded."""

    name: str
    module: str
    definitions: Sequence[Definition]


# --- from names to definitions -------------------------------------------------------


def source_of(module: str) -> Path:
    """Return the file of a module or package."""
    path = ROOT.joinpath(*module.split("."))
    package = path / "__init__.py"
    return package if package.exists() else path.with_suffix(".py")


@functools.cache
def parse(module: str) -> ast.Module:
    """Return the syntax tree of a module; an empty one if it is not in the package."""
    if not source_of(module).exists():
        return ast.Module(body=[], type_ignores=[])
    return ast.parse(source_of(module).read_text(encoding="utf-8"))


def statements(module: str) -> Iterator[ast.stmt]:
    """Yield the statements of a module: those of `with` and of TYPE_CHECKING, too."""
    for node in parse(module).body:
        match node:
            case (
                ast.With(body=body) | ast.If(test=ast.Name("TYPE_CHECKING"), body=body)
            ):
                yield from body
            case _:
                yield node


def imports(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield from which module, and under which name, a module imports a name."""
    for node in statements(module):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    yield node.module, alias.name


@dataclass(frozen=True)
class Group:
    """Names of a module that belong together.

    Attributes:
        title: the comment above them; empty if there is no comment.
        names: in the order of `__all__`.
    """

    title: str
    names: Sequence[str]


def groups_of(module: str) -> Iterator[Group]:
    """Yield the groups of names in a module's `__all__`."""
    lines = source_of(module).read_text(encoding="utf-8").splitlines()
    for node in statements(module):
        if (
            not isinstance(node, ast.Assign)
            or ast.unparse(node.targets[0]) != "__all__"
        ):
            continue
        title, names = "", list[str]()
        above = node.lineno
        for each in cast("ast.List", node.value).elts:
            comments = [line.strip() for line in lines[above : each.lineno - 1]]
            above = each.lineno
            if comments:
                yield Group(title, names)
                title = " ".join(text.removeprefix("# ") for text in comments)
                names = []
            names.append(ast.literal_eval(each))
        yield Group(title, names)


def find(module: str, name: str) -> Named | None:
    """Return the definitions of a name, following imports; None for other objects."""
    definitions = [
        node
        for node in statements(module)
        if isinstance(node, Definition) and node.name == name
    ]
    if definitions:
        return Named(name, module, definitions)
    for source, original in imports(module, name):
        if source_of(f"{source}.{original}").exists():  # a module of its own
            return None
        return find(source, original)
    return None


def find_constant(module: str, name: str) -> tuple[str, ast.AnnAssign] | None:
    """Return where a constant is annotated, following imports; None for others."""
    for node in statements(module):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return module, node
    for source, original in imports(module, name):
        return find_constant(source, original)
    return None


# --- signatures ----------------------------------------------------------------------


def is_decorated(node: Definition, name: str) -> bool:
    """Return whether a definition has a decorator of this name, called or not."""
    decorators = (
        each.func if isinstance(each, ast.Call) else each
        for each in node.decorator_list
    )
    return any(ast.unparse(each).rpartition(".")[2] == name for each in decorators)


def parameters(node: Function, *, is_method: bool) -> list[str]:
    """Return the parameters as they are written, without self and cls."""
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    written = [_written(*pair) for pair in zip(positional, defaults, strict=True)]
    if args.posonlyargs:
        written.insert(len(args.posonlyargs), "/")
    if is_method and not is_decorated(node, "staticmethod"):
        written = written[1:]
    if args.vararg is not None:
        written.append("*" + _written(args.vararg, None))
    elif args.kwonlyargs:
        written.append("*")
    keywords = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    written += [_written(*pair) for pair in keywords]
    if args.kwarg is not None:
        written.append("**" + _written(args.kwarg, None))
    return written[1:] if written[:1] == ["/"] else written


def _written(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {ast.unparse(argument.annotation)}"
        return text if default is None else f"{text} = {ast.unparse(default)}"
    return text if default is None else f"{text}={ast.unparse(default)}"


def signature(name: str, node: Function, *, is_method: bool = False) -> str:
    """Return a function's signature, broken into lines if it is long."""
    listed = parameters(node, is_method=is_method)
    kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    if is_decorated(node, "asynccontextmanager"):
        kind, result = "async with ", ""
    short = f"{kind}{name}({', '.join(listed)}){result}"
    if len(short) <= SIGNATURE_COLUMNS:
        return short
    lines = "".join(f"    {parameter},\n" for parameter in listed)
    return f"{kind}{name}(\n{lines}){result}"


def class_signature(named: Named, node: ast.ClassDef) -> str:
    """Return how a class is called: by its constructor, its fields or its members."""
    constructor = constructor_of(named, node)
    if constructor is not None:
        constructor.returns = None
        return signature(named.name, constructor, is_method=True)
    fields = [
        ast.unparse(field)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.target)[0] != "_"
    ]
    is_record = is_decorated(node, "dataclass") or "NamedTuple" in _bases(node)
    if not fields or not is_record:
        return f"class {named.name}"
    lines = "".join(f"    {field},\n" for field in fields)
    return f"{named.name}(\n{lines})"


def constructor_of(named: Named, node: ast.ClassDef) -> ast.FunctionDef | None:
    """Return a class's `__init__`, its own or inherited, if users may call it."""
    for owner in _with_bases(named.module, node):
        for method in owner.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                docstring = ast.get_docstring(method) or INTERNAL
                return None if docstring.startswith(INTERNAL) else method
    return None


def _bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base) for base in node.bases]


# --- docstrings ----------------------------------------------------------------------


def render(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring as Markdown."""
    prose: list[str] = []
    section, body = "", prose
    for line in [*docstring.splitlines(), "Source:"]:
        heading = HEADING.match(line)
        if heading is None:
            body.append(line)
            continue
        if section:
            yield from _section(section, textwrap.dedent("\n".join(body)).strip())
        elif text := "\n".join(prose).strip():
            yield _prose(text)
        section, body = heading[1], [heading[2] or ""]
        if heading[2]:  # what follows on the same line is not indented
            body = [f"    {heading[2]}"]


def _section(title: str, body: str) -> Iterator[str]:
    if not body:
        return
    if title == "Example":
        yield f"**Example**\n\n```text\n{body}\n```"
    elif title in LISTS:
        items = re.split(r"\n(?=\S)", body)
        yield f"**{title}**\n\n" + "\n".join(_item(item) for item in items)
    else:
        yield f"**{title}:** {_prose(body)}"


def _item(text: str) -> str:
    joined = " ".join(text.split())
    match = ITEM.match(joined)
    return f"- `{match[1]}`: {match[2]}" if match else f"- {joined}"


def _prose(text: str) -> str:
    """Keep indented blocks as code, join the lines of paragraphs."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if all(line.startswith("    ") for line in block.splitlines()):
            blocks.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            blocks.append(" ".join(block.split()))
    return "\n\n".join(blocks)


# --- the pages -----------------------------------------------------------------------


def entry(named: Named, prefix: str) -> Iterator[str]:
    """Yield the paragraphs about one public name."""
    yield f"## {prefix}.{named.name}"
    first, last = named.definitions[0], named.definitions[-1]
    if isinstance(first, ast.ClassDef):
        yield f"```text\n{class_signature(named, first)}\n```"
        yield from _documented(first)
        yield from enum_members(named.module, first)
        if (constructor := constructor_of(named, first)) is not None:
            yield from _documented(constructor)
        yield from members(named, first)
        return
    shown = [node for node in named.definitions if not isinstance(node, ast.ClassDef)]
    overloads = [node for node in shown if is_decorated(node, "overload")] or shown
    lines = "\n".join(signature(named.name, node) for node in overloads[:4])
    yield f"```text\n{lines}\n```"
    yield from _documented(last)


def enum_members(module: str, node: ast.ClassDef) -> Iterator[str]:
    """Yield a list of an enum's members, each with its value and its comment."""
    if ENUMS.isdisjoint(_bases(node)):
        return
    lines = source_of(module).read_text(encoding="utf-8").splitlines()
    items = []
    for member in node.body:
        if isinstance(member, ast.Assign):
            comment = lines[member.lineno - 1][member.end_col_offset or 0 :].strip()
            comment = comment.removeprefix("#").strip()
            about = f": {comment}" if comment else ""
            items.append(f"- `{ast.unparse(member)}`{about}")
    yield "**Members**\n\n" + "\n".join(items)


def members(named: Named, node: ast.ClassDef) -> Iterator[str]:
    """Yield the paragraphs about a class's public methods, its own and inherited."""
    seen: set[str] = set()
    for owner in _with_bases(named.module, node):
        for method in owner.body:
            if not isinstance(method, Function) or method.name in seen:
                continue
            if not _is_listed(method):
                continue
            seen.add(method.name)
            yield f"### {named.name}.{method.name}"
            if not is_decorated(method, "property"):
                text = signature(method.name, method, is_method=True)
                yield f"```text\n{text}\n```"
            yield from _documented(method)


def _is_listed(node: Function) -> bool:
    docstring = ast.get_docstring(node)
    if docstring is None:  # an overload; its implementation has one
        return False
    if docstring.startswith(INTERNAL):
        return False
    return not node.name.startswith("_") or node.name in SPECIAL


def _with_bases(module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield a class, then those of its bases that are asyncrpc's."""
    yield node
    for base in _bases(node):
        package, _, name = base.partition("[")[0].rpartition(".")
        where = module
        for source, original in imports(module, package):
            where = f"{source}.{original}"
        parent = find(where, name)
        if parent is not None and isinstance(parent.definitions[0], ast.ClassDef):
            yield from _with_bases(parent.module, parent.definitions[0])


def _documented(node: Definition) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if docstring is not None:
        yield from render(docstring)


def pages(folder: Path) -> Mapping[str, str]:
    """Return the text of each page by its module, with links as from a folder."""
    reference = Path(os.path.relpath(REFERENCE, folder)).as_posix()
    head = (
        f"All modules: [API]({reference}/api.md). "
        f"See also [errors]({reference}/errors.md) and [limits]({reference}/limits.md)."
    )
    first_module: dict[tuple[str, str], str] = {}
    return {
        module: "\n\n".join(_paragraphs(module, head, first_module)) + "\n"
        for module in MODULES
    }


def _paragraphs(
    module: str, head: str, first_module: dict[tuple[str, str], str]
) -> Iterator[str]:
    yield f"# {module}"
    yield head
    yield from _documented_module(module)
    for group in groups_of(module):
        elsewhere: list[str] = []
        if group.title:
            yield f"**{group.title}**"
        for name in group.names:
            named = find(module, name)
            if named is None:
                yield from constant(module, name)
                continue
            first = first_module.setdefault((named.module, named.name), module)
            if first == module:
                yield from entry(named, module)
            else:
                elsewhere.append(f"[`{name}`]({first}.md#{_anchor(first, name)})")
        if elsewhere:
            yield f"Also here: {', '.join(elsewhere)}."


def _anchor(module: str, name: str) -> str:
    return f"{module}.{name}".replace(".", "").lower()


def _documented_module(module: str) -> Iterator[str]:
    docstring = ast.get_docstring(parse(module))
    if docstring is not None:
        yield from render(docstring)


def constant(module: str, name: str) -> Iterator[str]:
    """Yield the paragraphs about a name that is not a class, function or module."""
    if f"{module}.{name}" in MODULES:
        return
    yield f"## {module}.{name}"
    if (definition := find_constant(module, name)) is None:
        return
    where, node = definition
    value = f" = {ast.unparse(node.value)}" if node.value is not None else ""
    text = f"{name}: {ast.unparse(node.annotation)}{value}"
    text = textwrap.fill(text, SIGNATURE_COLUMNS, subsequent_indent="    ")
    yield f"```text\n{text}\n```"
    nodes = parse(where).body
    after = nodes[nodes.index(node) + 1]
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
        yield from render(str(after.value.value))


def main(folder: Path) -> None:
    """Write the pages into a folder, which need not be there."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for module, text in pages(folder).items():
        (folder / f"{module}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
