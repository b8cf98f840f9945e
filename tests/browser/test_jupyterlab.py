"""Lesson 02 in a real JupyterLab in a real Chromium: it runs, its live view moves, a hint button answers.

Needs JupyterLab, Playwright and a Chromium (Debian: `apt-get install chromium`; or name one in CHROMIUM). Its
screenshots stay in .build/browser/.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab", reason="JupyterLab is not in this image: Colab has its own page")
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not in this image")

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / ".build" / "browser"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
LESSON = "02_nvidia_smi.ipynb"
MOST_S = 240

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium here: `apt-get install chromium`, or set CHROMIUM"
    ),
]

SETTINGS = {
    # All cells in the page at once, so that the test finds those that are scrolled away.
    "notebook-extension/tracker": {"windowingMode": "none"},
    # No question about news, no look for updates.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab that serves a copy of the lessons."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in ("notebooks", "course_utils"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        )
    for name, values in SETTINGS.items():
        file = tmp_path / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--port={port}", "--ServerApp.port_retries=0"]
    command += ["--ip=127.0.0.1", "--IdentityProvider.token=", "--allow-root", f"--ServerApp.root_dir={tmp_path}"]
    environment = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"), "JUPYTER_PLATFORM_DIRS": "1"}
    with (tmp_path / "lab.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for_server(address, server, tmp_path / "lab.log")
            yield address
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # the kernels too
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def wait_for_server(address: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/api", timeout=5):
                return
        except OSError:
            assert server.poll() is None, f"JupyterLab ended: {log.read_text()[-2000:]}"
            time.sleep(0.3)
    raise AssertionError(f"JupyterLab did not answer within 60 s: {log.read_text()[-2000:]}")


@pytest.fixture
def page(tmp_path: Path) -> Iterator["sync_api.Page"]:
    with sync_api.sync_playwright() as playwright:
        # Chromium refuses its sandbox to root. The other switches keep it from looking for the outside world.
        switches = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
        switches += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            switches.append("--no-sandbox")
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=switches)
        try:
            yield browser.new_page(viewport={"width": 1400, "height": 1000})
        finally:
            browser.close()


def test_lesson_02_runs_draws_live_and_answers(lab: str, page: "sync_api.Page") -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{lab}/lab/tree/notebooks/{LESSON}")
    page.locator(".jp-NotebookPanel .jp-Notebook .jp-Cell").first.wait_for(timeout=60_000)
    run_all_cells(page)

    live = page.locator("svg[aria-label^='Busy percent of']").first
    deadline = time.monotonic() + MOST_S
    while not live.count():
        assert_no_error(page)
        assert time.monotonic() < deadline, f"no live view within {MOST_S} s"
        time.sleep(0.2)
    first = live.inner_html()
    deadline = time.monotonic() + 20
    while live.inner_html() == first:
        assert time.monotonic() < deadline, "the live view did not move while the training ran"
        time.sleep(0.2)
    assert live.locator("rect").count() > 1, "the live view has a frame but no bar"

    wait_until_all_cells_ran(page)
    assert page.locator("img[alt^='Busy percent of']").count() >= 2, "the traces are not drawn"

    hint = page.get_by_role("button", name="Hint 1").first
    hint.scroll_into_view_if_needed()
    hint.click()
    answer = page.locator(".jupyter-widgets", has_text=re.compile("Hint 1 of 2: ")).first
    answer.wait_for(timeout=20_000)

    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "lesson02_hint.png")
    live.scroll_into_view_if_needed()
    page.screenshot(path=SCREENSHOTS / "lesson02_live.png")
    assert not errors, errors


def run_all_cells(page: "sync_api.Page") -> None:
    """Choose it in the menu, again if the kernel was not yet listening: JupyterLab says idle a little too early."""
    for _ in range(5):
        dialog = page.locator(".jp-Dialog")
        if dialog.count():  # such as "the kernel is not ready": it would cover the menu
            print("JupyterLab asked:", dialog.first.inner_text())
            dialog.locator(".jp-mod-accept").first.click()
        page.get_by_text("Python 3 (ipykernel) | Idle").first.wait_for(timeout=60_000)
        page.wait_for_timeout(1_000)
        page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").wait_for(timeout=60_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        try:
            page.locator(".jp-CodeCell .jp-InputPrompt", has_text=re.compile(r"\[[*\d]+\]:")).first.wait_for(
                timeout=5_000
            )
        except sync_api.TimeoutError:
            continue
        return
    raise AssertionError("Run All Cells did nothing, five times")


def assert_no_error(page: "sync_api.Page") -> None:
    errors = page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").all_inner_texts()
    assert not errors, errors[0][-2000:]


def wait_until_all_cells_ran(page: "sync_api.Page") -> None:
    prompts = page.locator(".jp-CodeCell .jp-InputPrompt")
    deadline = time.monotonic() + MOST_S
    while True:
        assert_no_error(page)
        texts = [text.strip() for text in prompts.all_inner_texts()]
        # The setup cell's source is hidden, and its number with it.
        if len(texts) > 1 and all(re.fullmatch(r"\[\d+\]:", text) for text in texts if text):
            return
        assert time.monotonic() < deadline, f"after {MOST_S} s not all cells had run: {texts}"
        time.sleep(0.5)
