"""The documentation: ``sphinx-build -W docs docs/_build/html``."""

import importlib.metadata
import inspect
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from api_tables import summary, without_tables  # noqa: E402

project = "pyro-mcvae"
author = "the pyro-mcvae contributors"
release = importlib.metadata.version("pyro-mcvae")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
html_theme = "furo"
html_show_copyright = False
html_title = f"pyro-mcvae {release}"
html_theme_options = {"navigation_with_keys": True}
html_css_files = ["style.css"]
# One script that draws formulas without fonts or a network: the pages are read offline as well.
mathjax_path = "tex-svg.js"
carrier = importlib.metadata.distribution("sphinx-mathjax-offline")  # of MathJax 3.2.2
carried = carrier.locate_file(f"sphinx-mathjax-offline/static/mathjax/{mathjax_path}")
html_static_path = ["_static", str(carried)]

# The notebooks are committed with their outputs: a page shows what was run.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # The fields of the docstrings say it in words.
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
# `from pyro_mcvae import X` is how they are used, whatever module they are written in.
add_module_names = False
python_use_unqualified_type_names = True


def copy_notebooks() -> None:
    """Sphinx reads pages below this folder only, and the tutorials live in their own."""
    target = HERE / "tutorials"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    names = []
    for path in sorted((ROOT / "tutorials").glob("[0-9]*.ipynb")):
        text = path.read_text(encoding="utf-8").replace("](../docs/", "](../")
        (target / path.name).write_text(text, encoding="utf-8")
        names.append(path.stem)
    toctree = "\n".join(["```{toctree}", ":maxdepth: 1", "", *names, "```"])
    introduction = (ROOT / "tutorials" / "README.md").read_text(encoding="utf-8")
    introduction = introduction.replace("](../docs/", "](../")
    hidden = toctree.replace(":maxdepth: 1", ":hidden:")
    (target / "index.md").write_text(f"{introduction}\n{hidden}\n", encoding="utf-8")


def read_in_place(app, docname: str, source: list[str]) -> None:
    """Links lead to the tutorials' own folder, as the repository has them; pages to the copies."""
    text = without_tables(source[0]).replace("](../tutorials/README.md)", "](tutorials/index.md)")
    source[0] = re.sub(r"\]\((\.\./)?\.\./tutorials/(?=\w+\.ipynb)", r"](\1tutorials/", text)


def list_names() -> None:
    """A page with every export, and the reference of those that no other page has."""
    import pyro_mcvae

    folder = HERE / "api"
    others = [path for path in sorted(folder.glob("*.md")) if path.stem != "names"]
    pages = "".join(path.read_text(encoding="utf-8") for path in others)
    known = set(re.findall(r"auto(?:class|function):: (?:[\w.]+\.)?(\w+)", pages))
    lines = ["# All names", "", "| | |", "| --- | --- |"]
    rest = ["```{eval-rst}", ".. currentmodule:: pyro_mcvae", ""]
    for name in sorted(pyro_mcvae.__all__, key=str.lower):
        value = getattr(pyro_mcvae, name)
        lines.append(f"| {{py:obj}}`~pyro_mcvae.{name}` | {summary(value)} |")
        if name not in known:
            kind = "class" if inspect.isclass(value) else "function"
            rest += [f".. auto{kind}:: {name}", *(["   :members:"] * (kind == "class"))]
    text = "\n".join([*lines, "", *rest, "```", ""])
    (folder / "names.md").write_text(text, encoding="utf-8")


def separate_references(app, what, name, obj, options, lines) -> None:
    """Numbered references become a list; docstrings have them as lines of one paragraph."""
    for i, line in enumerate(lines):
        if re.match(r"\[\d+\] [A-Z]", line):
            lines[i] = "| " + line
            for j in range(i + 1, len(lines)):
                if not lines[j].strip() or re.match(r"\[\d+\] [A-Z]", lines[j]):
                    break
                lines[j] = "  " + lines[j]


def setup(app) -> None:
    copy_notebooks()
    list_names()
    app.connect("autodoc-process-docstring", separate_references)
    app.connect("source-read", read_in_place)
