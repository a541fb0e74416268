"""JupyterLab itself on a folder of notebooks, in Debian's Chromium; and a reader who runs them, looks, and moves what can be moved."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import ElementHandle, Locator, Page

CHECKS = (Path(__file__).parent / "checks.js").read_text()
HEIGHT = 1500
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
# All outputs are to be in the page, not only those in view; nothing is asked of the network.
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"},
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}

MOVABLE = "e => !e.closest('[disabled]') && (e.matches('select') ? e.length > 1 : !e.min || e.min !== e.max)"  # there is another value
IDLE = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'"
CONTROL = ".noUi-handle, select, input"
# The keys that take a control to its next and to its previous value; a text is not moved. JupyterLab keeps the arrows of a list that is not
# open for itself, and goes to another cell: a reader opens it with Enter.
KEYS = {"slider": ("ArrowRight", "ArrowLeft"), "number": ("ArrowUp", "ArrowDown"), "select-one": ("ArrowDown", "ArrowUp"),
        "checkbox": ("Space", "Space")}
AT_END = """e => e.matches("select") ? e.selectedIndex === e.length - 1 : e.matches(".noUi-handle") ? e.ariaValueNow === e.ariaValueMax
    : Boolean(e.max) && e.value === e.max"""
BY_MOUSE = ("slider", "number", "checkbox")  # the list of a select is the browser's own, outside the page


def missing() -> str | None:
    """What this machine lacks, and how to get it."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[test]'"
    if shutil.which("chromium") is None:
        return "no chromium: apt-get install chromium fonts-dejavu fonts-noto-core"
    return None


@contextmanager
def jupyterlab(folder: Path, home: Path) -> Iterator[str]:
    """JupyterLab on a folder of notebooks, with settings of its own below `home`; yields its address, token included."""
    for name, settings in SETTINGS.items():
        file = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython",
           "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces"}
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with (home / "lab.log").open("w") as log:
        lab = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser", "--ip=127.0.0.1",
             f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=t", f"--notebook-dir={folder}"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **{k: str(home / v) for k, v in own.items()}}, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token=t").close()
                break
            except OSError:
                assert lab.poll() is None, (home / "lab.log").read_text()
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/lab?token=t"
    finally:
        lab.terminate()
        lab.wait()


@contextmanager
def browser(address: str) -> Iterator[Reader]:
    """Chromium with JupyterLab open."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        chromium = p.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                  "--disable-component-update", "--disable-sync"])
        page = chromium.new_page(viewport={"width": 1280, "height": HEIGHT})
        page.set_default_timeout(60_000)
        reader = Reader(page)
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_function("() => window.jupyterapp?.restored")
        page.evaluate("() => window.jupyterapp.restored")
        page.evaluate(CHECKS)
        yield reader
        chromium.close()


class Reader:
    """One notebook at a time: open it, run it, look at it, move its explorers, close it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []  # what the page itself complained of
        page.on("pageerror", lambda e: self.problems.append(f"page error: {e}"))
        page.on("console", lambda m: m.type == "error" and self.problems.append(f"console: {m.text[:300]}"))

    def _command(self, name: str, **arguments: Any) -> None:
        self.page.evaluate("async ([name, given]) => { await window.jupyterapp.commands.execute(name, given) }", [name, arguments])

    @contextmanager
    def notebook(self, name: str) -> Iterator[None]:
        """Open a notebook and wait for its kernel; afterwards end the kernel and close it."""
        self.problems.clear()
        self.look(1280, "light")
        self._command("docmanager:open", path=name, factory="Notebook")
        self.page.wait_for_function("""name => {
            const w = window.jupyterapp.shell.currentWidget, kernel = w?.sessionContext?.session?.kernel;
            return w?.context?.path === name && w.context.isReady && w.sessionContext.isReady
                && kernel?.status === "idle" && kernel.connectionStatus === "connected"; }""", arg=name)
        try:
            yield
        finally:
            self.page.evaluate("""async () => {
                const w = window.jupyterapp.shell.currentWidget;
                await w.sessionContext.shutdown();
                w.context.model.dirty = false;
                w.dispose(); }""")

    def run_all(self, timeout: float = 150) -> None:
        """As a reader does, from the menu; until no cell is left to run, or one has failed and the rest do not run."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_function("""() => {
            const w = window.jupyterapp.shell.currentWidget;
            const cells = w.content.widgets.filter(c => c.model.type === "code" && c.model.sharedModel.source.trim());
            const failed = cells.some(c => c.model.outputs.toJSON().some(o => o.output_type === "error"));
            return (failed || cells.every(c => c.model.executionCount)) && cells.every(c => c.model.executionState !== "running")
                && w.sessionContext.session.kernel.status === "idle"; }""", timeout=1000 * timeout, polling=100)
        self._drawn()

    def _drawn(self, timeout: float = 20) -> None:
        """Until all figures and widgets are there and nothing moves; what is not there by then, `check` tells."""
        from playwright.sync_api import TimeoutError

        with suppress(TimeoutError):
            self.page.wait_for_function("() => !checks.undrawn().length", timeout=1000 * timeout, polling=100)
        self.page.evaluate("() => checks.settled()")

    def look(self, width: int, theme: str) -> None:
        """From a window of that many pixels, in that theme; returns when all is drawn."""
        if self.page.viewport_size != {"width": width, "height": HEIGHT}:
            self.page.set_viewport_size({"width": width, "height": HEIGHT})
        self._command("apputils:change-theme", theme=THEMES[theme])
        self.page.wait_for_function("theme => document.body.dataset.jpThemeName === theme", arg=THEMES[theme])
        if self.page.evaluate("() => Boolean(window.jupyterapp.shell.currentWidget?.sessionContext)"):
            self.page.evaluate("() => checks.settled()")

    def check(self, *names: str) -> list[str]:
        """The complaints of these functions of checks.js."""
        return [f"{name}: {found}" for name in names for found in self.page.evaluate(f"() => checks.{name}()")]

    def pictures(self, path: str) -> None:
        """The whole notebook, a window at a time, as {path}-00.png and so on."""
        scroll = """n => { const e = window.jupyterapp.shell.currentWidget.content.node.querySelector(".jp-WindowedPanel-outer");
                           e.scrollTop = n * (e.clientHeight - 60); return e.scrollTop + e.clientHeight >= e.scrollHeight - 1; }"""
        for n in range(100):
            last = self.page.evaluate(scroll, n)
            self.page.screenshot(path=f"{path}-{n:02d}.png")
            if last:
                break

    # -- explorers

    def move_explorers(self) -> list[str]:
        """Move all controls of each explorer by keyboard, and one of each kind by mouse; Tab must reach every control.

        Each move must change the text or the picture, and some moves the text: a control may choose what is drawn.
        """
        found = []
        for n, explorer in enumerate(self.page.locator(".jp-Notebook .mxdebug-explorer").all(), 1):
            node = explorer.element_handle()
            controls = [c for c in map(Control, explorer.locator(CONTROL).all()) if c.movable]
            by_mouse = {c.kind: c for c in controls if c.kind in BY_MOUSE}
            by_keyboard = [c for c in controls if c.kind in KEYS]
            text = self.page.evaluate("e => checks.text(e)", node)
            found += [f"explorer {n}: does not move by keyboard: {c}" for c in by_keyboard if not self._moves(node, c, c.press)]
            if self.page.evaluate("e => checks.text(e)", node) == text:
                found.append(f"explorer {n}: its text does not change")
            found += [f"explorer {n}: does not move by mouse: {c}" for c in by_mouse.values() if not self._moves(node, c, c.drag)]
            found += [f"explorer {n}: Tab does not reach {c}" for c in self._unreached(controls)]
            found += [] if controls else [f"explorer {n}: no controls"]
        self._drawn()
        return found

    def _moves(self, explorer: ElementHandle, control: Control, move: Callable[[], None]) -> bool:
        """Whether an explorer shows something else after a move. One that it refuses is taken back, since no other would show after it."""
        moved = self._changes(explorer, move)
        if moved and self.page.evaluate("e => checks.text(e).trim()", explorer).startswith("!"):
            self._changes(explorer, control.back)
        return moved

    def _changes(self, explorer: ElementHandle, move: Callable[[], None]) -> bool:
        """Whether an explorer shows something else after a move."""
        from playwright.sync_api import TimeoutError

        before = self.page.evaluate("e => checks.picture(e)", explorer)
        move()
        try:
            self.page.wait_for_function("([e, before]) => checks.picture(e) !== before", arg=[explorer, before], timeout=15_000)
        except TimeoutError:
            return False
        self.page.wait_for_function(IDLE)  # other controls may follow the one that was moved
        return True

    def _unreached(self, controls: list[Control]) -> list[Control]:
        """Those on which Tab does not stop, from just before the first on."""
        if controls:
            controls[0].at.focus()
            self.page.keyboard.press("Shift+Tab")
            self.page.evaluate("() => checks.focused.clear()")
        for _ in range(3 * len(controls) + 3):  # a slider has its number, too, as a place where Tab stops
            self.page.keyboard.press("Tab")
        return [c for c in controls if not c.at.evaluate("e => checks.focused.has(e)")]


class Control:
    """Something in an explorer that can be moved."""

    def __init__(self, at: Locator) -> None:
        self.at = at
        self.kind: str = at.evaluate("e => e.matches('.noUi-handle') ? 'slider' : e.type")
        self.down = False  # where its last step went
        self.movable = at.is_visible() and at.evaluate(MOVABLE)

    def press(self) -> None:
        """The key that takes it one step up, or down where it is at its end."""
        self.down = self.at.evaluate(AT_END)
        self._press(KEYS[self.kind][self.down])

    def back(self) -> None:
        """Undo such a step, or that of a mouse on a number or a checkbox."""
        self._press(KEYS[self.kind][not self.down])

    def _press(self, key: str) -> None:
        page = self.at.page
        self.at.focus()
        if self.kind == "select-one":
            page.keyboard.press("Enter")
            page.wait_for_function("e => e.matches(':open')", arg=self.at.element_handle())
        page.keyboard.press(key)
        if self.kind in ("select-one", "number"):
            page.keyboard.press("Enter")

    def drag(self) -> None:
        """A slider to the middle of its longer side; the arrow of a number; a click on a checkbox."""
        self.at.scroll_into_view_if_needed()
        box, mouse = self.at.bounding_box(), self.at.page.mouse
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        if self.kind == "slider":
            track = self.at.locator("xpath=ancestor::*[contains(@class, 'noUi-base')]").bounding_box()
            left, right = track["x"], track["x"] + track["width"]
            mouse.move(x, y)
            mouse.down()
            mouse.move((x + (right if right - x > x - left else left)) / 2, y, steps=4)
            mouse.up()
        elif self.kind == "number":
            mouse.move(x, y)  # the arrows appear under the mouse
            self.down = self.at.evaluate(AT_END)
            mouse.click(box["x"] + box["width"] - 8, box["y"] + box["height"] * (0.7 if self.down else 0.3))
        else:
            mouse.click(x, y)

    def __str__(self) -> str:
        label = "e => e.closest('.jupyter-widgets')?.querySelector('.widget-label')?.textContent || e.textContent"
        return f"{self.kind} {self.at.evaluate(label)}"
