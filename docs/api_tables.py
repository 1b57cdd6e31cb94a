"""
Tables of names for the pages of the reference, with the first sentence of each docstring.

They make the pages readable in the repository, before Sphinx has run. ``python docs/api_tables.py``
writes the tables into ``docs/api``, and a test compares them with the docstrings. In the built
pages the names link to the entries.
"""

import importlib
import inspect
import re
from pathlib import Path

__all__ = ["summary", "with_references", "with_tables", "without_tables"]

HERE = Path(__file__).parent
ROOT = HERE.parent
BEGIN, END = "<!-- names: python docs/api_tables.py -->", "<!-- end of names -->"
_TABLE = re.compile(rf"{BEGIN}\n.*?{END}\n\n", re.S)
_BLOCK = re.compile(r"^```\{eval-rst\}\n.*?^```$", re.M | re.S)


def summary(value: object) -> str:
    """Return the first sentence of a docstring, without its citations, as Markdown."""
    text = (inspect.getdoc(value) or "").split("\n\n")[0]
    text = re.sub(r":math:`([^`]*)`", r"$\1$", text)
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?([^`]*)`", r"`\1`", text)
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    text = re.sub(r"(?:, as in)? \[[\d, a-zA-Z]*\]", "", re.sub(r"\s+", " ", text))
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0].rstrip(":., ")


def without_tables(text: str) -> str:
    """Return a page without its tables."""
    return _TABLE.sub("", text)


def with_references(text: str) -> str:
    """Return a page as Sphinx reads it: the names in its tables link to the entries below."""
    entries, module = {}, "pyro_mcvae"
    for directive, name in re.findall(r"^\.\. (\w+):: ([\w.]+)", text, re.M):
        if directive == "currentmodule":
            module = name
        else:
            entries[name.rpartition(".")[2]] = name if "." in name else f"{module}.{name}"

    def linked(match: re.Match[str]) -> str:
        return f"| {{py:obj}}`~{entries[match[1]]}` |" if match[1] in entries else match[0]

    return re.sub(r"^\| \[`(\w+)`\]\([^)]*\.py\) \|", linked, text, flags=re.M)


def with_tables(text: str) -> str:
    """Return a page with a table before each block of names."""
    module = "pyro_mcvae"

    def tabled(match: re.Match[str]) -> str:
        nonlocal module
        block, lines = match.group(), []
        for directive, name in re.findall(r"^\.\. (\w+):: ([\w.]+)", block, re.M):
            if directive == "currentmodule":
                module = name
            else:
                lines.append(_line(*name.rpartition(".")[::2] if "." in name else (module, name)))
        if not lines:
            return block
        return "\n".join([BEGIN, "| name | |", "| --- | --- |", *lines, END, "", block])

    return _BLOCK.sub(tabled, without_tables(text))


def _line(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    path = Path(inspect.getsourcefile(inspect.unwrap(value)) or "").relative_to(ROOT)
    return f"| [`{name}`](../../{path.as_posix()}) | {summary(value).replace('|', chr(92) + '|')} |"


def main() -> None:
    for path in sorted((HERE / "api").glob("*.md")):
        if path.stem != "names":  # Sphinx makes this page
            text = path.read_text(encoding="utf-8")
            path.write_text(with_tables(text), encoding="utf-8")


if __name__ == "__main__":
    main()
