"""The layout is the architecture: imports go down only, and importing changes nothing.

floor 0     arithmetic on tensors (torch only, except ops/compat.py): ops, chains
floors 1-5  a pair of Pyro programs as a log weight: programs run, structure sorts, checks stop,
            particles run side by side, coordinates move
floor 6     sums over discrete sites, and searches of their states
floor 7     objectives
floor 8     judgement, and what stands around a training loop
"""

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyro
import pyro.nn
import torch

import pyro_mcvae

# The first part of a module's path below the package, and its floor.
FLOORS = {
    "ops": 0,
    "chains": 0,
    "programs": 1,
    "structure": 2,
    "checks": 3,
    "particles": 4,
    "coordinates": 5,
    "discrete": 6,
    "truncated": 6,
    "elbos": 7,
    "compiled": 8,
    "evaluation": 8,
    "training": 8,
}
ON_FLOOR_0 = {*sys.stdlib_module_names, "torch"}
# The private interfaces of torch and Pyro, for all floors.
COMPAT = "pyro_mcvae.ops.compat"
# Methods that torch and Pyro call, or leave to be called, on objects of subclasses.
OVERRIDDEN = {
    *("_pyro_sample", "_process_message", "_postprocess_message", "_get_trace"),
    *("_load_from_state_dict", "_save_to_state_dict", "_setup_prototype", "_create_plates"),
}
# Names with an underscore that Python documents.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_getframe"}
# What an installation without extras has; torch needs the last one.
CORE = {*sys.stdlib_module_names, "torch", "pyro", "typing_extensions"}


@dataclass(frozen=True)
class Import:
    """One import statement's target, as a full module name."""

    importer: str
    target: str
    line: int
    at_top: bool  # runs when the module is imported

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def find_modules(package: Path) -> dict[str, Path]:
    """Full module name -> file."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def statements(node: ast.AST, at_top: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """The import statements below a node, and whether importing the module runs them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_top
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        only_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from statements(child, at_top and not is_function and not only_for_types)


@functools.cache
def find_imports(package: Path) -> list[Import]:
    """Every import of every module, relative ones and those inside functions included."""
    modules, result = find_modules(package), []
    for name, path in modules.items():
        for node, at_top in statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                base = node.module or ""
                if node.level:
                    parts = name.split(".")
                    up = node.level - (path.name == "__init__.py")
                    parent = parts[: len(parts) - up]
                    base = ".".join([*parent, *filter(None, [node.module])])
                # `from package import module` means the module, `from module import name` does not.
                full = [f"{base}.{alias.name}" for alias in node.names]
                targets = [target if target in modules else base for target in full]
            result += [Import(name, t, node.lineno, at_top) for t in dict.fromkeys(targets)]
    return result


def violations(package: Path) -> list[str]:
    """What breaks the architecture, one line each; an empty list if nothing does."""
    modules = find_modules(package)
    imports = find_imports(package)
    root = package.name

    def part_of(module: str) -> str:
        return module.split(".")[1] if "." in module else ""  # "" is the package's own __init__

    result = [
        f"{name} stands on no floor: give {part_of(name)!r} one in FLOORS"
        for name in modules
        if part_of(name) and part_of(name) not in FLOORS
    ]
    for item in imports:
        importer, inside = part_of(item.importer), item.target.split(".")[0] == root
        floor = FLOORS.get(importer, len(FLOORS))
        if inside:
            target = part_of(item.target)
            if importer and FLOORS.get(target, len(FLOORS)) > floor:
                result.append(f"{item}: up, from floor {floor}")
            continue
        distribution = item.target.split(".")[0]
        is_compat = item.importer == COMPAT and distribution == "pyro"
        if floor == 0 and distribution not in ON_FLOOR_0 and not is_compat:
            result.append(f"{item}: floor 0 is torch only")
        elif item.at_top and distribution not in CORE:
            result.append(f"{item}: optional, so import it where it is used")

    graph: dict[str, set[str]] = {name: set() for name in modules}
    for item in imports:
        if item.target in modules:  # also for types alone: two files that know each other are one
            graph[item.importer].add(item.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        result.append("cycle: " + " <- ".join(error.args[1]))
    return result


def test_imports_go_down_only() -> None:
    package = Path(pyro_mcvae.__file__).parent
    assert len(find_imports(package)) > 10  # The checker found the package.
    assert violations(package) == []


def is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a module defines: functions, classes, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(getattr(node, "ctx", None), ast.Store) and "." in ast.unparse(node):
            yield from re.findall(r"^(?:self|cls)\.(\w+)$", ast.unparse(node))


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, private name and kind of each import from torch or Pyro, attribute and string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = (getattr(node, "module", None) or "").split(".")
            names = [part for alias in node.names for part in alias.name.split(".")]
            if {module[0], names[0]} & {"torch", "pyro", "functorch"}:
                yield from ((node.lineno, n, "import") for n in (*module, *names) if is_private(n))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            own = ast.unparse(node.value) in ("self", "cls", "super()")
            yield node.lineno, node.attr, "own attribute" if own else "attribute"
        elif isinstance(node, ast.Constant) and is_private(str(node.value)):
            yield node.lineno, node.value, "string"


def test_private_interfaces_are_used_in_one_file() -> None:
    modules = find_modules(Path(pyro_mcvae.__file__).parent)
    trees = {n: ast.parse(path.read_text(encoding="utf-8")) for n, path in modules.items()}
    compat = trees.pop(COMPAT)
    theirs = {name for _, name, _ in private_uses(compat)} - set(own_names(compat))
    assert {"_C", "_pytree", "_PYRO_STACK", "_pyro_dims", "_enumerate_dim", "_base"} <= theirs
    objects = (torch.zeros(1), torch.nn.Linear(1, 1), pyro.get_param_store(), pyro.nn.PyroModule())
    theirs |= {name for value in objects for name in dir(value) if is_private(name)}
    ours = {name for tree in trees.values() for name in own_names(tree)} | OVERRIDDEN | DOCUMENTED

    def is_theirs(name: str, kind: str) -> bool:
        if kind in ("import", "string"):
            return kind == "import" or name in theirs - ours
        return name not in ours or (kind == "attribute" and name in theirs - OVERRIDDEN)

    assert [
        f"{module}:{line}: {kind} {name}"
        for module, tree in trees.items()
        for line, name, kind in private_uses(tree)
        if is_theirs(name, kind)
    ] == []


def test_importing_changes_no_global_state() -> None:
    script = textwrap.dedent(
        """
        import json, logging, random, sys, warnings
        import numpy, pyro, pyro.contrib, pyro.distributions, pyro.infer, pyro.optim, torch
        import torch.utils.checkpoint  # in torch 2.5 the first to import sympy, which sets a filter

        def state():
            return {
                "default dtype": str(torch.get_default_dtype()),
                "threads": torch.get_num_threads(),
                "grad enabled": torch.is_grad_enabled(),
                "Pyro's settings": {k: str(v) for k, v in pyro.settings.get().items()},
                "torch's validation": torch.distributions.Distribution._validate_args,
                "warnings filters": [str(f) for f in warnings.filters],
                "log level": logging.getLogger().level,
                "torch's seed": torch.get_rng_state().tolist(),
                "random's seed": str(random.getstate()),
                "numpy's seed": str(numpy.random.get_state()),
                "parameters": list(pyro.get_param_store().keys()),
                "Pyro's stack": len(pyro.poutine.runtime._PYRO_STACK),
            }

        before = state()
        import pyro_mcvae
        after = state()
        changed = {k: [before[k], after[k]] for k in before if before[k] != after[k]}
        optional = {"arviz", "matplotlib", "sklearn", "skimage", "torchvision"} & set(sys.modules)
        print(json.dumps([changed, sorted(optional)]))
        """
    )
    root = Path(pyro_mcvae.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=root, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    changed, optional = json.loads(result.stdout)
    assert changed == {}
    assert optional == []


def test_all_names_exist() -> None:
    assert len(set(pyro_mcvae.__all__)) == len(pyro_mcvae.__all__) > 0
    for name in pyro_mcvae.__all__:
        assert hasattr(pyro_mcvae, name), name
    assert {"TraceSGVB_ELBO", "TraceIWAE_ELBO"} <= set(pyro_mcvae.__all__)
