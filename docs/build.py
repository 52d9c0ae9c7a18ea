"""Build the documentation: README.md and docs/*.md as pages, and a gallery of what examples/plot_*.py draw.

    python docs/build.py [--out docs/build] [--without-examples]

Each example runs in an empty folder of its own and writes its plots (.html, .svg, .png) there; its page shows its
docstring, its plots, what it printed and its code. An example that fails is shown with its error, and the build
ends with exit status 1 after everything else has been built. The pages need no network.
"""

from __future__ import annotations

import argparse
import ast
import html
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

FIRST = ("README", "start", "loader", "orders", "training", "data")
"""Pages that come first in the navigation, where they exist; the others follow by name."""
LAST = ("CONTRIBUTING", "CHANGELOG", "log")
PLOTS = (".html", ".svg", ".png")
TIME_LIMIT_S = 300
STYLE = """
body{margin:0;font:16px/1.55 system-ui,sans-serif;color:#1c2733;display:flex}
nav{width:15rem;min-height:100vh;padding:1.5rem;background:#eef3f7;box-sizing:border-box;flex:none}
nav a{display:block;color:#21506e;text-decoration:none;padding:.15rem 0}nav a.here{font-weight:600}
main{max-width:52rem;padding:1.5rem 2.5rem;min-width:0}pre{background:#f6f8fa;padding:.8rem;overflow:auto}
code{font:14px/1.45 ui-monospace,monospace}table{border-collapse:collapse}
td,th{border:1px solid #ccd6de;padding:.3rem .6rem;text-align:left}img{max-width:100%}
iframe{width:100%;height:34rem;border:1px solid #ccd6de}
"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of the navigation."""

    title: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """What running one example gave."""

    name: str
    title: str
    text: str
    code: str
    plots: tuple[str, ...]
    printed: str
    failed: bool
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=root / "docs" / "build")
    parser.add_argument("--without-examples", action="store_true")
    options = parser.parse_args()
    failed = build(root, options.out, examples=not options.without_examples)
    say(f"pages: {options.out / 'index.html'}")
    for name in failed:
        say(f"failed: examples/{name}.py, see its page")
    return 1 if failed else 0


def build(root: Path, out: Path, *, examples: bool = True) -> list[str]:
    """Write all pages to ``out``; the names of the examples that failed."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "style.css").write_text(STYLE + HtmlFormatter().get_style_defs("pre"), encoding="utf-8")
    shown = [run_example(file, out) for file in sorted(root.glob("examples/plot_*.py"))] if examples else []
    sources = markdown_files(root)
    entries = [Entry(title=title_of(file), file=page_name(file)) for file in sources]
    if shown:
        entries.append(Entry(title="Gallery", file="gallery.html"))
    for file in sources:
        write(out, page_name(file), title_of(file), convert(file.read_text(encoding="utf-8")), entries)
    for example in shown:
        write(out, f"{example.name}.html", example.title, example_page(example), entries)
    if shown:
        write(out, "gallery.html", "Gallery", gallery(shown), entries)
    copy_images(root, out)
    return [example.name for example in shown if example.failed]


# ---- pages from Markdown


def markdown_files(root: Path) -> list[Path]:
    files = [root / "README.md", *root.glob("docs/*.md"), root / "CONTRIBUTING.md", root / "CHANGELOG.md"]

    def place(file: Path) -> tuple[int, str]:
        if file.stem in FIRST:
            return FIRST.index(file.stem) - len(FIRST), file.stem
        return (1 + LAST.index(file.stem) if file.stem in LAST else 0), file.stem

    return sorted((file for file in files if file.is_file()), key=place)


def page_name(file: Path) -> str:
    return "index.html" if file.name == "README.md" else f"{file.stem}.html"


def title_of(file: Path) -> str:
    """The first heading, or the file's name."""
    found = re.search(r"^# (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return found.group(1).strip() if found else file.stem


def convert(text: str) -> str:
    """Markdown to HTML; links to other Markdown files lead to their pages."""
    markdown = MarkdownIt("commonmark", {"highlight": coloured}).enable("table")
    page = markdown.render(text)
    return re.sub(r'href="(?!https?:)([^"#]*?)([^"/#]+)\.md(#[^"]*)?"', _link, page)


def _link(found: re.Match[str]) -> str:
    return f'href="{page_name(Path(found.group(2) + ".md"))}{found.group(3) or ""}"'


def coloured(code: str, language: str, _: str = "") -> str:
    """The code as a <pre> block, coloured where the language is known."""
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return f"<pre><code>{html.escape(code)}</code></pre>"
    return "<pre><code>" + str(highlight(code, lexer, HtmlFormatter(nowrap=True))) + "</code></pre>"


def copy_images(root: Path, out: Path) -> None:
    for image in (*root.glob("docs/*.svg"), *root.glob("docs/*.png")):
        for folder in (out, out / "docs"):  # README says docs/plot.svg, pages in docs say plot.svg
            folder.mkdir(exist_ok=True)
            shutil.copy(image, folder / image.name)


def write(out: Path, name: str, title: str, body: str, entries: Iterable[Entry]) -> None:
    links = "".join(
        f'<a href="{e.file}"{" class=here" if e.file == name else ""}>{html.escape(e.title)}</a>'
        for e in entries
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="style.css">'
        f"<title>{html.escape(title)}</title><nav>{links}</nav><main>{body}</main></html>\n"
    )
    (out / name).write_text(page, encoding="utf-8")


# ---- the gallery


def run_example(file: Path, out: Path) -> Example:
    """Run the example in an emptied folder of its own."""
    folder = out / "examples" / file.stem
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    code = file.read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(code)) or file.stem).partition("\n")
    say(f"running examples/{file.name}")
    start = time.monotonic()
    status, printed = run_python(file, folder)
    plots = sorted(path for path in folder.rglob("*") if path.suffix in PLOTS)
    if status == 0 and not plots:
        status, printed = 1, printed + "\nThe example wrote no plot into its folder."
    return Example(
        name=file.stem,
        title=title.rstrip("."),
        text=text.strip(),
        code=code,
        plots=tuple(path.relative_to(out).as_posix() for path in plots),
        printed=printed,
        failed=status != 0,
        seconds=time.monotonic() - start,
    )


def run_python(file: Path, folder: Path) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
    try:
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"stopped: it ran longer than {TIME_LIMIT_S} seconds"
    return done.returncode, done.stdout


def example_page(example: Example) -> str:
    state = "failed" if example.failed else "ran"
    parts = [f"<h1>{html.escape(example.title)}</h1>", convert(example.text)]
    for plot in example.plots:
        shown = (
            f'<iframe src="{plot}" title="plot"></iframe>'
            if plot.endswith(".html")
            else f'<img src="{plot}" alt="plot">'
        )
        parts.append(f'{shown}<p><a href="{plot}">open the plot alone</a></p>')
    parts.append(f"<p>It {state} in {example.seconds:.1f} s.</p>")
    if example.printed.strip():
        parts.append(f"<h2>Printed</h2><pre><code>{html.escape(example.printed)}</code></pre>")
    parts.append(f"<h2>examples/{example.name}.py</h2>{coloured(example.code, 'python')}")
    return "\n".join(parts)


def gallery(examples: Iterable[Example]) -> str:
    lines = [
        f'<li><a href="{e.name}.html">{html.escape(e.title)}</a>{" (failed)" if e.failed else ""}</li>'
        for e in examples
    ]
    return f"<h1>Gallery</h1><p>Each page was made by running the example.</p><ul>{''.join(lines)}</ul>"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
