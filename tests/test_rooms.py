"""The rooms of the package: each imports only those below it, and no files import each other in a circle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import cp_engine

PACKAGE = Path(cp_engine.__file__).parent
ROOMS = ("errors", "algebra", "exchange", "kernels", "plan", "primitives", "config", "runtime", "hosts", "job")
"""Bottom to top."""
OF_JOB = (("checks",), ("launch", "toml"), ("training", "train"), ("verify",), ("explain", "modes"), ("cli",))
"""Likewise inside `job`; what is beside each other imports nothing of each other."""
BESIDE = {"__init__.py", "__main__.py", "py.typed"}
NO_ROOM = {"hydra_errors", "refusal", "user_folder", "options"}
"""Of `job`, what explains to a user what Hydra refused: below the command, above what reads TOML files."""
LARGEST = 320


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in PACKAGE.rglob("*.py")}
MODULES = {name: path for name, path in FILES.items() if name not in ("", "__main__")}


def imports_of(name: str, path: Path) -> Iterator[str]:
    """Modules of the package that a module imports, wherever in it: also in a function, and for the type checker."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            continue
        for target in targets:
            package, _, rest = target.partition(".")
            if package == "cp_engine" and rest:
                found = rest if rest in MODULES else rest.rpartition(".")[0]
                if found and found != name:
                    yield found


IMPORTS = {name: set(imports_of(name, path)) for name, path in MODULES.items()}


def level_of(name: str) -> tuple[int, int]:
    """Of a module: the room, and the place inside `job`."""
    room, _, rest = name.partition(".")
    place = next((i for i, names in enumerate(OF_JOB) if rest.partition(".")[0] in names), 1)
    return ROOMS.index(room), place if room == "job" else 0


def test_top_of_the_package_is_its_rooms() -> None:
    there = {path.relative_to(PACKAGE).parts[0] for path in FILES.values()} - BESIDE
    assert there == {"errors.py", *ROOMS[1:]}
    inside = {name.split(".")[1] for name in MODULES if name.startswith("job.")}
    assert inside == {name for names in OF_JOB for name in names} | NO_ROOM


def test_nothing_imports_upwards() -> None:
    up = [f"{a} imports {b}" for a, names in IMPORTS.items() for b in names if level_of(b) > level_of(a)]
    assert up == []


def test_folders_of_a_job_on_one_level_import_nothing_of_each_other() -> None:
    across = [
        f"{a} imports {b}"
        for names in OF_JOB[:2]
        for a in IMPORTS
        for b in IMPORTS[a]
        if level_of(a) == level_of(b)
        and a.split(".")[1:2] != b.split(".")[1:2]
        and {a.split(".")[1], b.split(".")[1]} <= {*names}
    ]
    assert across == []


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_a_folder_says_what_is_in_it_and_imports_nothing() -> None:
    for name, path in FILES.items():
        if path.name == "__init__.py" and name:
            tree = ast.parse(path.read_text())
            assert ast.get_docstring(tree), f"{name}/__init__.py says nothing"
            assert not IMPORTS[name], f"{name}/__init__.py imports {IMPORTS[name]}"


def test_files_are_small() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: count for name, count in lines.items() if count > LARGEST} == {}


def test_public_names_are_where_the_package_says() -> None:
    assert all(getattr(cp_engine, name).__name__ == name for name in cp_engine.__all__ if name != "__version__")
