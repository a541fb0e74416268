"""The notebooks as a reader has them: JupyterLab in Chromium, all cells run, figures looked at, explorers moved by keyboard and by mouse.

Where there is no Chromium these are skipped, or fail with MXDEBUG_BROWSER=required. MXDEBUG_SCREENSHOTS names a folder for pictures of
every notebook, a window at a time, at both widths in both themes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from driver import Reader, browser, jupyterlab, missing

from mxdebug import lab

pytestmark = pytest.mark.browser
NOTEBOOKS = sorted(p.name for p in lab.source().glob("*.ipynb"))
WIDTHS = (1280, 900)
THEMES = ("light", "dark")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `mxdebug lab` copies, without the stored outputs: what is seen is drawn here."""
    folder = tmp_path_factory.mktemp("notebooks")
    lab.copy(folder)
    for path in folder.glob("*.ipynb"):
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)
        path.write_text(json.dumps(notebook))
    return folder


@pytest.fixture(scope="module")
def reader(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    if (what := missing()) is not None:
        (pytest.fail if os.environ.get("MXDEBUG_BROWSER") == "required" else pytest.skip)(what)
    with jupyterlab(folder, tmp_path_factory.mktemp("lab")) as address, browser(address) as reader:
        yield reader


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(reader: Reader, name: str, tmp_path: Path) -> None:
    screenshots = os.environ.get("MXDEBUG_SCREENSHOTS")
    with reader.notebook(name):
        reader.run_all()
        found = reader.check("errors", "texts", "undrawn")
        assert not found, "\n".join(found)
        for width, theme in product(WIDTHS, THEMES):
            reader.look(width, theme)
            found += [f"{width} {theme} {f}" for f in reader.check("cut", "crowded", "unreadable")]
            if screenshots:
                reader.pictures(str(Path(screenshots) / f"{Path(name).stem}-{width}-{theme}"))
        found += reader.move_explorers()
        found += [f"moved: {f}" for f in reader.check("errors", "texts", "raised", "undrawn", "cut", "crowded")]
        found += reader.problems
        if found:
            reader.page.screenshot(path=tmp_path / "seen.png")
    assert not found, "\n".join([*found, f"screenshot: {tmp_path / 'seen.png'}"])
