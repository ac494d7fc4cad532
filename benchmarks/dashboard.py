"""The dashboard beside a long run: how long a page takes, what it holds, what it costs the run.

    python benchmarks/dashboard.py [--lines 50000] [--minutes 10] [--runs 3]

Pages are run as streamlit runs them, without a browser: what it draws is not counted. A page that
is looked at is refreshed every two seconds, as a live one, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from results import record

from agent_forge.config.phases import ORDER, phase_folder
from agent_forge.store import files, lock
from agent_forge.store.sessions import SessionStore
from agent_forge.ui import dashboard
from agent_forge.ui.dashboard import state

BENCHMARK = "dashboard"
PAGES = ("overview", "phases", "evolution", "models", "comparison", "system")
NAMES = [f"part{n}/train/{name}" for n in range(3) for name in ("loss_avg_100", "rate", "norm")]
STEPS = 1_500  # of the toy run


def write_run(root: Path, lines: int) -> Path:
    """A session in its first phase that has measured much."""
    store = SessionStore(root)
    asked = {"asked": {"phases": list(ORDER[1:])}, "config_hash": "0" * 64}
    folder = store.create({"preset": "smoke"}, "", session_id="long", details=asked)
    files.write_checked(folder / phase_folder("cognate") / "state.json", {"status": "running"})
    append(folder, 0, lines)
    return folder


def append(folder: Path, first: int, count: int) -> None:
    """More lines of metrics."""
    text = bytearray()
    for step in range(first, first + count):
        measured = {name: 1 / (step + 1 + i) for i, name in enumerate(NAMES)}
        row = {"phase": "cognate", "step": step, "time": time.time(), "metrics": measured}
        text += json.dumps(row).encode() + b"\n"
    files.append(folder / "metrics.jsonl", bytes(text))


def browser(root: Path) -> Any:
    """A page as streamlit's own tests run it."""
    from streamlit.testing.v1 import AppTest

    os.environ["FORGE_STORAGE"] = str(root)
    app = AppTest.from_file(str(Path(dashboard.__file__).with_name("app.py")), default_timeout=120)
    return app.run()


def show(app: Any, page: str) -> tuple[float, float]:
    """Seconds that a page takes, and of them those of the processor."""
    from streamlit.util import calc_hash

    app._page_hash = calc_hash(page)
    began, cpu = time.perf_counter(), time.process_time()
    app.run()
    if app.exception or app.error:
        raise RuntimeError(f"{page}: {[e.value for e in (*app.exception, *app.error)]}")
    return time.perf_counter() - began, time.process_time() - cpu


def refreshes(root: Path, folder: Path, lines: int) -> None:
    """How long each page takes when something new was measured."""
    began, cpu = time.perf_counter(), time.process_time()
    app = browser(root)
    spent = time.perf_counter() - began, time.process_time() - cpu
    values = {"seconds": round(spent[0], 3), "cpu_s": round(spent[1], 3)}
    record(BENCHMARK, {"lines": lines, "page": "overview, first of all"}, values)
    written = lines
    for page in PAGES:
        show(app, page)
        found = []
        for _ in range(5):
            append(folder, written, 20)
            written += 20
            time.sleep(state.FRESH_S)
            found.append(show(app, page))
        seconds, cpu_s = (sorted(values)[len(values) // 2] for values in zip(*found, strict=True))
        values = {"seconds": round(seconds, 3), "cpu_s": round(cpu_s, 3)}
        record(BENCHMARK, {"lines": lines, "page": page}, values)


def memory(root: Path, folder: Path, lines: int, minutes: float) -> None:
    """What a page that is looked at for minutes holds more than at the beginning."""
    app, process, written = browser(root), psutil.Process(), 2 * lines
    for page in PAGES[:3]:
        show(app, page)
    readings, end, cpu = [], time.monotonic() + 60 * minutes, time.process_time()
    while time.monotonic() < end:
        append(folder, written, 20)
        written += 20
        show(app, PAGES[len(readings) % 3])
        readings.append(process.memory_info().rss / 1e6)
        time.sleep(state.LIVE_S)
    share = (time.process_time() - cpu) / (60 * minutes)
    third = max(1, len(readings) // 3)
    values: dict[str, Any] = {"refreshes": len(readings), "mb_first": round(readings[0], 1)}
    values |= {"mb_after_a_third": round(readings[third], 1), "mb_last": round(readings[-1], 1)}
    values |= {"cpu_share_of_a_core": round(share, 3)}
    record(BENCHMARK, {"lines": lines, "minutes": minutes}, values)


def look(root: str, session: str) -> None:
    """Refresh a page as long as this process is let live."""
    store = SessionStore(root)
    while not (store.path(session) / "session.json").is_file():
        time.sleep(0.05)
    app = browser(Path(root))
    while True:
        show(app, "overview")
        time.sleep(state.LIVE_S)


def toy(root: Path, session: str) -> tuple[float, float]:
    """CPU seconds and seconds of a toy run, as a process of its own."""
    command = [sys.executable, "-m", "agent_forge", "run", "--preset=toy", f"--session={session}"]
    command += [f"--storage={root}", f"--set=phases.toy.steps={STEPS}", "--progress=none"]
    command += ["--set=runtime.threads=1"]
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return cpu, time.perf_counter() - began


def slow_down(runs: int) -> None:
    """A toy run alone, and with an open page: alternately, the least of each counts."""
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "with an open page": []}
    for number in range(runs):
        for name, own in found.items():
            with tempfile.TemporaryDirectory() as folder:
                watcher = None
                if name != "alone":
                    context = multiprocessing.get_context("spawn")
                    watcher = context.Process(target=look, args=(folder, f"r{number}"))
                    watcher.start()
                try:
                    own.append(toy(Path(folder), f"r{number}"))
                finally:
                    if watcher:
                        watcher.kill()
                        watcher.join()
    least = {name: min(cpu for cpu, _ in own) for name, own in found.items()}
    values = {f"cpu_s_{name.replace(' ', '_')}": round(cpu, 2) for name, cpu in least.items()}
    share = least["with an open page"] / least["alone"] - 1
    record(BENCHMARK, {"toy_steps": STEPS, "runs": runs}, {**values, "slower": round(share, 4)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    slow_down(given.runs)  # first: a page that was made here has taken the place of this module
    with tempfile.TemporaryDirectory() as work:
        root = Path(work)
        folder = write_run(root, given.lines)
        with lock.exclusive(folder):  # it looks as if it ran
            refreshes(root, folder, given.lines)
            memory(root, folder, given.lines, given.minutes)


if __name__ == "__main__":
    main()
