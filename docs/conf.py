"""The documentation: ``sphinx-build -W docs docs/_build/html``."""

import base64
import importlib.metadata
import inspect
import json
import re
import shutil
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from api_tables import summary, with_references  # noqa: E402

project = "pyro-mcvae"
author = "the pyro-mcvae contributors"
release = importlib.metadata.version("pyro-mcvae")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
html_theme = "furo"
html_show_copyright = False
html_title = f"pyro-mcvae {release}"
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
pygments_dark_style = "github-dark"
# Doctests are copied without their prompts and outputs.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
html_css_files = ["style.css"]
# One script that draws formulas without fonts or a network, so that the pages work offline.
mathjax_path = "tex-svg.js"
carrier = importlib.metadata.distribution("sphinx-mathjax-offline")  # of MathJax 3.2.2
carried = carrier.locate_file(f"sphinx-mathjax-offline/static/mathjax/{mathjax_path}")
html_static_path = ["_static", str(carried)]

# Inventories with the names that the pages use, so that the build needs no network.
intersphinx_mapping = {
    name: (address, str(HERE / "inventories" / f"{name}.inv"))
    for name, address in {
        "pyro": "https://docs.pyro.ai/en/stable/",
        "python": "https://docs.python.org/3/",
        "torch": "https://docs.pytorch.org/docs/stable/",
    }.items()
}

# Parts of the package without an entry: internals that docstrings name.
nitpick_ignore_regex = [
    (r"py:\w+", r"(\w+\.)*(Beginning|Evaluation|GradientMode|Labellings|WeightedParticles)"),
    (r"py:\w+", r"(\w+\.)*(LeadingDimsError|bounds|coordinate_of|estimate|gradients|guide_elbo)"),
    (r"py:\w+", r"(\w+\.)*(loss|model_log_prob|posterior|smoothing)"),
]

# The notebooks are committed with their outputs.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the fields of the docstrings have the types
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
# Users import every name from pyro_mcvae.
add_module_names = False
python_use_unqualified_type_names = True


def copy_notebooks() -> None:
    """Copy the tutorials below this folder, since Sphinx reads no other pages, with a gallery."""
    target = HERE / "tutorials"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    names, gallery = [], []
    for path in sorted((ROOT / "tutorials").glob("[0-9]*.ipynb")):
        text = path.read_text(encoding="utf-8").replace("](../docs/", "](../")
        text = re.sub(r"\[(\w+)\]\(\w+\.py\)", r"`\1.py`", text)
        (target / path.name).write_text(text, encoding="utf-8")
        names.append(path.stem)
        gallery += pictures(json.loads(text), path.stem, target)
    toctree = "\n".join(["```{toctree}", ":maxdepth: 1", "", *names, "```"])
    introduction = (ROOT / "tutorials" / "README.md").read_text(encoding="utf-8")
    introduction = introduction.replace("](../docs/", "](../")
    introduction = re.sub(r"\[(`\w+\.py`)\]\(\w+\.py\)", r"\1", introduction)
    hidden = toctree.replace(":maxdepth: 1", ":hidden:")
    panels = "\n\n".join(["::::{container} gallery", *gallery, "::::"])
    text = f"{introduction}\n## Gallery\n\n{panels}\n\n{hidden}\n"
    (target / "index.md").write_text(text, encoding="utf-8")


def pictures(notebook: dict, stem: str, folder: Path) -> list[str]:
    """Save the figures of a notebook, and return a link with each of them to the notebook."""
    title = "".join(notebook["cells"][0]["source"]).splitlines()[0].lstrip("# ")
    links = []
    for cell in notebook["cells"]:
        data = [output.get("data", {}) for output in cell.get("outputs", [])]
        figures = [d["image/png"] for d in data if "image/png" in d]
        for figure in figures[:1] if "mystnb" in cell["metadata"] else []:
            name = f"{stem}_{len(links)}.png"
            (folder / name).write_bytes(base64.b64decode(figure))
            alt = cell["metadata"]["mystnb"]["image"]["alt"]
            links.append(f"[![{alt}]({name})<br>{title}]({stem}.ipynb)")
    return links


def read_in_place(app, docname: str, source: list[str]) -> None:
    """Point links to the tutorials' folder at the copies."""
    text = with_references(source[0]).replace("](../tutorials/README.md)", "](tutorials/index.md)")
    # Links to a page of the reference become links to the entry.
    text = re.sub(r"\[`(\w+)`\]\((?:\.\./)?api/\w+\.md\)", r"{py:obj}`~pyro_mcvae.\1`", text)
    source[0] = re.sub(r"\]\((\.\./)?\.\./tutorials/(?=\w+\.ipynb)", r"](\1tutorials/", text)


def write_inventories() -> None:
    """Write ``objects.inv`` of the other projects from the names in ``inventories/*.txt``."""
    for path in (HERE / "inventories").glob("*.txt"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line]
        head = f"# Sphinx inventory version 2\n# Project: {path.stem}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        body = zlib.compress("".join(f"{line}\n" for line in lines).encode())
        path.with_suffix(".inv").write_bytes(head.encode() + body)


def without_private_bases(app, name, obj, options, bases) -> None:
    """Show the bases of a class that have a page, and their public ancestors instead of others."""
    import pyro_mcvae

    names = [b for b in inspect.getmro(obj)[1:] if b is not object]
    public = [b for b in names if getattr(pyro_mcvae, b.__name__, None) is b]
    foreign = [b for b in names if b.__module__.split(".")[0] == "pyro"]
    shown = (public or [b for b in foreign if b.__name__ == "ELBO"])[:1]
    bases[:] = [f":py:class:`~pyro_mcvae.{b.__name__}`" for b in shown if b in public]
    bases += [f":py:class:`pyro.infer.{b.__name__}`" for b in shown if b not in public]


def list_names() -> None:
    """Write a page with every export, and the reference of those that no other page has."""
    import pyro_mcvae

    folder = HERE / "api"
    others = [path for path in sorted(folder.glob("*.md")) if path.stem != "names"]
    pages = "".join(path.read_text(encoding="utf-8") for path in others)
    known = set(re.findall(r"auto(?:class|function):: (?:[\w.]+\.)?(\w+)", pages))
    lines = ["# All names", "", "| | |", "| --- | --- |"]
    rest = ["```{eval-rst}", ".. currentmodule:: pyro_mcvae", ""]
    for name in sorted(pyro_mcvae.__all__, key=str.lower):
        value = getattr(pyro_mcvae, name)
        entry = re.search(rf"auto(?:class|function):: (pyro_mcvae\.[\w.]+\.{name})\n", pages)
        target = entry[1] if entry else f"pyro_mcvae.{name}"
        lines.append(f"| {{py:obj}}`~{target}` | {summary(value)} |")
        if name not in known:
            kind = "class" if inspect.isclass(value) else "function"
            rest += [f".. auto{kind}:: {name}", *(["   :members:"] * (kind == "class"))]
    text = "\n".join([*lines, "", *rest, "```", ""])
    (folder / "names.md").write_text(text, encoding="utf-8")


def separate_references(app, what, name, obj, options, lines) -> None:
    """Turn the numbered references of docstrings, lines of one paragraph, into a list."""
    for i, line in enumerate(lines):
        if re.match(r"\[\d+\] [A-Z]", line):
            lines[i] = "| " + line
            for j in range(i + 1, len(lines)):
                if not lines[j].strip() or re.match(r"\[\d+\] [A-Z]", lines[j]):
                    break
                lines[j] = "  " + lines[j]


def signature_of_init(app, what, name, obj, options, signature, returns):
    """Return the signature of a class whose ``__new__`` takes any arguments, and plain defaults."""
    if signature == "(*args, **kwargs)" and inspect.isclass(obj):
        signature = inspect.signature(obj)
        parameters = [
            p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
        ]
        signature = str(inspect.Signature(parameters))
    signature = re.sub(r"<class '(\w+)'>", r"\1", signature or "").replace("<factory>", "...")
    return (signature, returns) if signature else None


def repair_back_links(app, pagename, templatename, context, doctree) -> None:
    """Point the links from source code to the entries of names that have their module's address."""
    entries = app.env.get_domain("py").objects

    def entry(match: re.Match[str]) -> str:
        name = match[2].removeprefix("pyro_mcvae.")
        if match[2] in entries:  # which may be an alias
            return f"{match[1]}#{entries[match[2]].node_id}"
        found = [e for e in entries if e.endswith(f".{name}") or match[2].endswith(e[10:])]
        return f"{match[1]}#{found[0]}" if found else match[0]

    if pagename.startswith("_modules/pyro_mcvae/"):
        context["body"] = re.sub(r"(/api/\w+\.html)#(pyro_mcvae[\w.]+)", entry, context["body"])


def setup(app) -> None:
    copy_notebooks()
    list_names()
    write_inventories()
    app.connect("autodoc-process-docstring", separate_references)
    app.connect("autodoc-process-bases", without_private_bases)
    app.connect("autodoc-process-signature", signature_of_init)
    app.connect("source-read", read_in_place)
    app.connect("html-page-context", repair_back_links)
