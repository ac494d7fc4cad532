"""`forge dashboard` as a process, and windows of a headless Chromium that look at it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.common.exceptions import (
    ElementClickInterceptedException,
    ElementNotInteractableException,
    StaleElementReferenceException,
)
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support import polling

PATIENCE_S = 300.0  # pages are slow where much else is going on
until = partial(polling.until, seconds=PATIENCE_S, every_s=0.2)  # a look is work for the browser
PAGES = {  # their addresses by their titles
    "Overview": "",
    "Phase details": "phases",
    "Evolution": "evolution",
    "Models": "models",
    "Playground": "playground",
    "Compare runs": "comparison",
    "Configuration": "configuration",
    "System": "system",
}
WIDTH, HEIGHT = 1280, 900
MAIN = "[data-testid=stMainBlockContainer]"
FIGURES = ".js-plotly-plot svg.main-svg"
ERRORS = "[data-testid=stException], [data-testid=stAlertContentError]"
NOT_YET = (  # what is shown anew, or still moves
    ElementClickInterceptedException,
    ElementNotInteractableException,
    StaleElementReferenceException,
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-backgrounding-occluded-windows",  # all windows are, and none is looked at less
    "--disable-renderer-backgrounding",
    "--disable-background-timer-throttling",
    "--hide-scrollbars",
    f"--window-size={WIDTH},{HEIGHT}",
)
# Tells once nothing is left of what streamlit shows while a page is on its way, and all is drawn.
SETTLED = """
const tell = arguments[0], waits = ['[data-testid=stSkeleton]', '[data-testid=stSpinner]',
  '[data-stale=true]', '.js-plotly-plot:not(:has(.main-svg))'].join();
const look = () => {
  const app = document.querySelector('[data-testid=stApp][data-test-script-state=notRunning]');
  if (app && document.querySelector('h1') && !document.querySelector(waits)) tell(true);
  else setTimeout(look, 50);
};
look();
"""
# True if an element that is scrolled into view stays where it is.
RESTS = """
const [element, tell] = arguments;
element.scrollIntoView({block: 'center'});
const { x, y } = element.getBoundingClientRect();
setTimeout(() => {
  const now = element.getBoundingClientRect();
  tell(now.x === x && now.y === y);
}, 50);
"""


@dataclass
class Dashboard:
    """Where it listens, and what it said."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def end(self) -> int:
        """Ctrl-C, which a terminal sends to all that is in front; the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def dashboard(root: Path) -> Iterator[Dashboard]:
    """`forge dashboard` on a free port."""
    command = [sys.executable, "-m", "agent_forge", "dashboard", "--no-browser", "--port=0"]
    with tempfile.TemporaryDirectory(prefix="forge-log-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as writer:
            process = subprocess.Popen(
                [*command, f"--storage={root}"],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                start_new_session=True,
            )
        try:
            url = until(lambda: _address(process, log))
            found = Dashboard(process, url, log)
            yield found
            assert found.process.poll() is not None or found.end() == 0
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it says that it is, once it answers there."""
    said = log.read_text()
    assert process.poll() is None, said
    url = next((word for word in said.split() if word.startswith("http://localhost:")), "")
    if url:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/_stcore/health"):
            return url
    return ""


@contextlib.contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """A headless Chromium that has never been anywhere."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert browser and driver, "Chromium or its driver is missing: apt-get install chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="forge-chromium-", ignore_cleanup_errors=True) as place:
        for flag in (*FLAGS, f"--user-data-dir={place}"):
            options.add_argument(flag)
        opened = webdriver.Chrome(options, webdriver.ChromeService(driver))
        opened.set_script_timeout(PATIENCE_S)
        opened.command_executor.client_config.timeout = 2 * PATIENCE_S
        try:
            yield opened
        finally:
            opened.quit()


class Window:
    """A new window at a page, with what people see and do there."""

    def __init__(self, driver: webdriver.Chrome, url: str, page: str = "Overview") -> None:
        self.driver = driver
        driver.switch_to.new_window("window")
        self.handle = driver.current_window_handle
        self.resize(HEIGHT)
        self.theme("light")
        driver.get(f"{url}/{PAGES[page]}")
        self.settle()

    def look(self) -> None:
        """To this window, from another one."""
        self.driver.switch_to.window(self.handle)

    def close(self) -> None:
        """Close it, and be where the browser began."""
        self.look()
        self.driver.close()
        self.driver.switch_to.window(self.driver.window_handles[0])

    def resize(self, height: int) -> None:
        """Show so many pixels of the page."""
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def theme(self, name: str) -> None:
        """Light or dark, as the system of who looks has it."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.themed = name

    def run(self, script: str, *about: Any) -> Any:
        return self.driver.execute_script(script, *about)

    # -- looking -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until all of the page is shown."""
        assert self.driver.execute_async_script(SETTLED)

    def texts(self, css: str) -> list[str]:
        """What is to be read in each of the elements."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)"
        return [str(text) for text in self.run(script, css)]

    def text(self, css: str = MAIN) -> str:
        """What is to be read there, without the blanks around icons and lines."""
        return " ".join(" ".join(self.texts(css)).split())

    def see(self, text: str, css: str = MAIN) -> None:
        """Wait until it is to be read."""
        until(lambda: text in self.text(css))

    def find(self, xpath: str) -> list[WebElement]:
        return self.driver.find_elements(By.XPATH, xpath)

    def count(self, css: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, css))

    def grounds(self) -> set[str]:
        """The colours behind the page and its figures."""
        script = """return ['[data-testid=stApp]', '.js-plotly-plot .main-svg:first-child']
          .flatMap(css => [...document.querySelectorAll(css)])
          .map(e => getComputedStyle(e).backgroundColor)"""
        return set(self.run(script))

    def mark(self) -> None:
        """Leave a mark that is gone once the page is loaded again."""
        self.run("window.marked = true")

    def is_marked(self) -> bool:
        return bool(self.run("return window.marked === true"))

    def save(self, path: Path) -> None:
        assert self.driver.save_screenshot(str(path))

    # -- doing -------------------------------------------------------------------------------------

    def act(self, xpath: str, work: Callable[[WebElement], object]) -> None:
        """Do something with the first visible element, also if it is shown anew meanwhile."""

        def done() -> bool:
            with contextlib.suppress(*NOT_YET):
                for found in self.find(xpath):
                    if self.driver.execute_async_script(RESTS, found) and found.is_displayed():
                        work(found)
                        return True
            return False

        until(done)

    def go(self, page: str) -> None:
        """To a page by the sidebar."""
        link = f"//*[@data-testid='stSidebarNavLink'][normalize-space()={page!r}]"
        self.act(link, WebElement.click)
        until(lambda: self.text("h1") == page)
        self.settle()

    def press(self, label: str) -> None:
        """A button, once it can be pressed."""
        button = f"//button[not(@disabled)][descendant::p[normalize-space()={label!r}]]"
        self.act(button, WebElement.click)

    def unfold(self, label: str) -> None:
        """What is folded below its label."""
        self.act(f"//summary[contains(., {label!r})]", WebElement.click)

    def fill(self, label: str, text: str) -> None:
        """A field, as by typing over what is in it."""

        def typed(field: WebElement) -> None:
            field.send_keys(Keys.CONTROL, "a")
            field.send_keys(text, Keys.TAB)

        self.act(f"//*[self::input or self::textarea][@aria-label={label!r}]", typed)
        self.settle()

    def has(self, label: str, option: str) -> bool:
        """True if a field shows this option, by its first word."""
        return bool(self.find(f"{_field_of(label)}[{_begins('@value', option)}]"))

    def choose(self, label: str, option: str) -> None:
        """One of the options of a field, by its first word; its list is opened again if the page is
        made again meanwhile."""
        field = _field_of(label)
        offered = f"//*[@role='option'][{_begins('.', option)}]"

        def chosen() -> bool:
            if self.has(label, option):
                return True
            with contextlib.suppress(*NOT_YET):
                for found in self.find(offered) or self.find(f"{field}[@aria-expanded='false']"):
                    if self.driver.execute_async_script(RESTS, found):
                        found.click()
            return False

        until(chosen)
        self.settle()

    def say(self, text: str) -> None:
        """A message in the playground."""
        field = "//*[@data-testid='stChatInputTextArea']"
        self.act(field, lambda found: found.send_keys(text, Keys.ENTER))


def _field_of(label: str) -> str:
    """The input of a field with options."""
    return f"//*[@data-testid='stSelectbox'][label[normalize-space()={label!r}]]//input"


def _begins(where: str, word: str) -> str:
    """Says in XPath that a text begins with a word."""
    return f"starts-with(concat({where}, ' '), {word + ' '!r})"


def hosts(driver: webdriver.Chrome) -> set[str]:
    """The hosts that pages have asked for anything since this was called last."""
    found = set[str]()
    for entry in driver.get_log("performance"):
        message: dict[str, Any] = json.loads(entry["message"])["message"]
        told = message["params"]
        url = told.get("url") if message["method"] == "Network.webSocketCreated" else None
        if message["method"] == "Network.requestWillBeSent":
            url = told["request"]["url"]
        if url and urlsplit(url).scheme in ("http", "https", "ws", "wss"):
            found.add(str(urlsplit(url).hostname))
    return found
