"""The documentation builder, on a small project of its own and on this one's pages."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["docs_build"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attributes if name in ("href", "src") and value]


def local_links(page: Path) -> list[str]:
    parser = Links()
    parser.feed(page.read_text(encoding="utf-8"))
    return [link.partition("#")[0] for link in parser.found if not re.match(r"[a-z]+:|#", link)]


PLOT = '''"""A plot of nothing.

It shows *nothing*.
"""

from pathlib import Path

Path("nothing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
print("drew <nothing>")
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "docs").mkdir(parents=True)
    (root / "examples").mkdir()
    (root / "README.md").write_text("# Project\n\nSee [orders](docs/orders.md#two).\n", encoding="utf-8")
    (root / "docs" / "orders.md").write_text(
        "# Orders\n\n```python\nx = '<'\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    )
    (root / "docs" / "log.md").write_text("# Log\n")
    (root / "docs" / "alpha.md").write_text("no heading\n")
    (root / "examples" / "plot_nothing.py").write_text(PLOT)
    return root


def test_pages_and_gallery(builder: ModuleType, project: Path) -> None:
    out = project / "out"
    assert builder.build(project, out) == []
    index = (out / "index.html").read_text()
    assert 'href="orders.html#two"' in index
    titles = re.findall(r"<a href=[^>]*>([^<]*)</a>", index.partition("</nav>")[0])
    assert titles == ["Project", "Orders", "alpha", "Log", "Gallery"]
    orders = (out / "orders.html").read_text()
    assert "&lt;" in orders
    assert "<td>1</td>" in orders
    example = (out / "plot_nothing.html").read_text()
    assert "<em>nothing</em>" in example
    assert "drew &lt;nothing&gt;" in example
    assert 'src="examples/plot_nothing/nothing.svg"' in example


def test_every_link_leads_somewhere(builder: ModuleType, project: Path) -> None:
    out = project / "out"
    builder.build(project, out)
    for page in out.glob("*.html"):
        assert [link for link in local_links(page) if not (out / link).is_file()] == []


@pytest.mark.parametrize(
    ("code", "says"),
    [("raise RuntimeError('no luck')\n", "no luck"), ("print('done')\n", "wrote no plot")],
)
def test_an_example_that_fails_is_named_and_shown(
    builder: ModuleType, project: Path, code: str, says: str
) -> None:
    (project / "examples" / "plot_bad.py").write_text(code)
    assert builder.build(project, project / "out") == ["plot_bad"]
    assert says in (project / "out" / "plot_bad.html").read_text()
    assert "plot_nothing.html" in (project / "out" / "gallery.html").read_text()


def test_an_old_plot_is_not_shown_again(builder: ModuleType, project: Path) -> None:
    builder.build(project, project / "out")
    (project / "examples" / "plot_nothing.py").write_text(PLOT.replace("nothing.svg", "new.svg"))
    builder.build(project, project / "out")
    assert "nothing.svg" not in (project / "out" / "plot_nothing.html").read_text().partition("<h2>")[0]


def test_this_projects_pages_link_to_pages_that_exist(builder: ModuleType, tmp_path: Path) -> None:
    builder.build(ROOT, tmp_path, examples=False)
    missing = {}
    for page in tmp_path.glob("*.html"):
        lost = [
            link
            for link in local_links(page)
            if not (tmp_path / link).is_file() and not (ROOT / link).exists()
        ]
        if lost:
            missing[page.name] = lost
    assert missing == {}
