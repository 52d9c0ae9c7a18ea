"""The Python blocks of README.md and docs/*.md run as they stand.

A file's blocks run in order in one namespace, in a process and an empty folder of their own. A block whose fence
says ``python no-run`` is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
RUNNER = """
import json, sys
name, namespace = sys.argv[1], {"__name__": "__main__"}
for line, code in json.load(sys.stdin):
    exec(compile("\\n" * line + code, name, "exec"), namespace)
"""


def blocks(text: str) -> list[tuple[int, str]]:
    """(lines above the block's first line, code) of every Python block that is to run."""
    tokens = MarkdownIt("commonmark").parse(text)
    found = []
    for token in tokens:
        words = token.info.split()
        if token.type == "fence" and words[:1] == ["python"] and "no-run" not in words and token.map:
            found.append((token.map[0] + 1, token.content))
    return found


def run_blocks(file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / ".cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", RUNNER, str(file)],
        input=json.dumps(blocks(file.read_text(encoding="utf-8"))),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


FILES = [
    file
    for file in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
    if blocks(file.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_snippets_run(file: Path, tmp_path: Path) -> None:
    done = run_blocks(file, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


TEXT = """# Page

```python
x = 2
```

- in a list:

  ```python
  y = x + 1
  ```

```python no-run
raise SystemExit(3)
```

```
raise SystemExit(4)
```

```python
{last}
```
"""


def test_blocks_share_a_namespace_and_no_run_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(TEXT.format(last="assert y == 3\nprint('reached')"))
    done = run_blocks(file, tmp_path)
    assert (done.returncode, done.stdout) == (0, "reached\n")


def test_a_block_that_fails_is_found_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(TEXT.format(last="y.nothing"))
    done = run_blocks(file, tmp_path)
    assert done.returncode == 1
    line = file.read_text().splitlines().index("y.nothing") + 1
    assert f'page.md", line {line}' in done.stderr
