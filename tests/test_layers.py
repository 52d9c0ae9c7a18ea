"""The rules of the house: who may import whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "headrace"

GROUND = {"types", "errors"}
STAGES = {"source", "buffer", "order", "report"}
APPLICATIONS = {"cluster", "kernel", "topics", "agents"}
MAY_IMPORT = {
    "errors": set(),
    "types": {"errors"},
    "hardware": GROUND,
    "plan": GROUND,
    **dict.fromkeys(STAGES, GROUND),
    "engine": GROUND | STAGES | {"hardware", "plan"},
    **{name: GROUND | {"engine", "hardware", "plan"} for name in APPLICATIONS},
    # An estimator's cluster= is followed through `training`, so that no application knows another.
    "kernel": GROUND | {"engine", "hardware", "plan", "training"},
    "topics": GROUND | {"engine", "hardware", "plan", "training"},
    "agents": GROUND | {"engine", "hardware", "plan", "training"},
    "training": {"engine", "cluster"},
    "papers": GROUND | STAGES | APPLICATIONS | {"engine", "hardware", "plan"},
    "cli": GROUND | STAGES | APPLICATIONS | {"engine", "hardware", "plan", "papers", "training"},
    "__main__": {"cli"},
    "__init__": GROUND | STAGES | APPLICATIONS | {"engine", "hardware", "plan"},
}


def imports(path: Path, root: Path) -> set[str]:
    """The rooms of the house that the file at ``path`` imports, absolutely or relatively."""
    inside = path.relative_to(root).with_suffix("").parts
    package = list(inside[:-1])
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("headrace.")}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            parts = (node.module or "").split(".")
            if parts[0] == "headrace":
                rooms |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)] + (node.module or "").split(".")
            base = [part for part in base if part]
            rooms |= {base[0]} if base else {alias.name for alias in node.names}
    return rooms - {"__version__"}


def violations(root: Path) -> list[str]:
    found = []
    for path in sorted(root.rglob("*.py")):
        room = path.relative_to(root).with_suffix("").parts[0]
        wrong = sorted(imports(path, root) - MAY_IMPORT[room] - {room})
        found.extend(f"{path.relative_to(root)} imports {target}" for target in wrong)
    return found


def test_no_room_imports_what_it_must_not() -> None:
    assert violations(SRC) == []


@pytest.mark.parametrize(
    "line",
    [
        "from headrace.buffer import ring",
        "import headrace.engine.fit",
        "from headrace import engine",
        "from ..order import shuffled",
        "def f():\n    from headrace.papers import registry",
    ],
)
def test_a_planted_import_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "arrays.py").write_text(line + "\n", encoding="utf-8")
    assert len(violations(tmp_path)) == 1


def test_applications_do_not_import_one_another(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "model.py").write_text("from headrace.topics import lda\n", encoding="utf-8")
    assert violations(tmp_path) == ["kernel/model.py imports topics"]
