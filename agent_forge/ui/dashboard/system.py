"""This machine now and in the last five minutes, with alarms that say what to do."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import streamlit as st

from agent_forge.errors import ForgeError
from agent_forge.store import files, lock
from agent_forge.track.progress import size
from agent_forge.ui.dashboard import state
from agent_forge.ui.theme import Look

EVERY_S, KEPT_S = 2.0, 300.0  # between readings, and how long they are kept
GPU_EVERY_S = 10.0
RECENT_S = 10.0  # of a reading: a busy machine takes longer than EVERY_S
NO_ANSWER = (OSError, ValueError, IndexError, TypeError, subprocess.SubprocessError)
GPU_QUERY = "utilization.gpu,memory.used,memory.total,temperature.gpu"


class Reading(NamedTuple):
    """What was read at one moment; None where this machine does not tell."""

    at: float
    cpu: float | None  # percent
    memory: float  # percent
    memory_used: int
    memory_total: int
    own: int  # bytes of this dashboard
    free: int | None  # bytes of the disk of the storage root


class Gpu(NamedTuple):
    """The first GPU."""

    used: float  # percent
    memory: float  # MiB
    memory_total: float
    celsius: float


class Alarm(NamedTuple):
    critical: bool
    text: str
    remedy: str


@dataclass(frozen=True)
class Threshold:
    """From where on a reading is a warning, and critical."""

    warning: float
    critical: float
    remedy: str

    def alarm(self, value: float | None, text: str, sign: int = 1) -> Alarm | None:
        """`sign` is -1 where less is worse."""
        if value is None or value * sign < self.warning * sign:
            return None
        return Alarm(value * sign >= self.critical * sign, text, self.remedy)


CLEAN = "forge clean --dry-run shows what could go; forge vacuum empties the registry's log"
MEMORY = Threshold(75, 90, "close other programs, or stop a run: it goes on later where it was")
DISK = Threshold(10e9, 5e9, CLEAN)
GPU_MEMORY = Threshold(80, 95, "a smaller phases.PHASE.rows needs less")
GPU_HEAT = Threshold(75, 80, "look after its fans, or stop the run for a while")


class Machine:
    """Readings of the last minutes, taken when somebody looks."""

    def __init__(self) -> None:
        self.readings: deque[Reading] = deque(maxlen=int(KEPT_S / EVERY_S))
        self._process, self._lock = psutil.Process(), threading.Lock()
        self._gpu: tuple[float, Gpu | None] = (-GPU_EVERY_S, None)
        self._spent = seconds_spent()

    def read(self) -> Reading:
        """The newest reading, taken now unless somebody just did."""
        with self._lock:
            now = time.time()
            if self.readings and now - self.readings[-1].at < EVERY_S / 2:
                return self.readings[-1]
            memory = psutil.virtual_memory()
            free = None
            with contextlib.suppress(ForgeError, OSError):
                free = files.free_bytes(state.root().resolve())
            used = memory.total - memory.available
            own = int(self._process.memory_info().rss)
            cpu = self._cpu(now) if self.readings else None
            while self.readings and self.readings[0].at < now - KEPT_S:
                self.readings.popleft()
            reading = Reading(now, cpu, memory.percent, used, memory.total, own, free)
            self.readings.append(reading)
            return reading

    def _cpu(self, now_s: float) -> float | None:
        """The share of the processors' time that was work since the last reading, in percent; None
        if that is too long ago to be the load of now."""
        now, before = seconds_spent(), self._spent
        if now_s - self.readings[-1].at > RECENT_S:
            self._spent = now
            return None
        spent, idle = (new - old for new, old in zip(now, before, strict=True))
        if spent <= 0:  # their clock has not moved on
            return self.readings[-1].cpu
        self._spent = now
        return max(0.0, 100 * (1 - idle / spent))

    def gpu(self) -> Gpu | None:
        """The first GPU of NVIDIA's; None if there is none."""
        with self._lock:
            if time.monotonic() - self._gpu[0] > GPU_EVERY_S:
                self._gpu = time.monotonic(), read_gpu()
            return self._gpu[1]


def seconds_spent() -> tuple[float, float]:
    """Seconds of all processors since the machine was started, and how many of them were idle.

    psutil.cpu_percent compares with its last call by the same thread, and pages have many."""
    times = psutil.cpu_times()
    twice = sum(getattr(times, name, 0.0) for name in ("guest", "guest_nice"))
    return sum(times) - twice, times.idle + getattr(times, "iowait", 0.0)


@functools.cache
def _nvidia_smi() -> str | None:
    return shutil.which("nvidia-smi")


def read_gpu() -> Gpu | None:
    if (command := _nvidia_smi()) is None:
        return None
    asked = [command, f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(*NO_ANSWER):
        done = subprocess.run(asked, capture_output=True, timeout=5, check=True, text=True)
        return Gpu(*map(float, done.stdout.splitlines()[0].split(",")))
    return None


@st.cache_resource(show_spinner=False)
def machine() -> Machine:
    return Machine()


def alarms(reading: Reading, gpu: Gpu | None) -> list[Alarm]:
    """What is short, and what can be done about it."""
    free = reading.free
    found = [
        MEMORY.alarm(reading.memory, f"memory is {reading.memory:.0f} % full"),
        DISK.alarm(free, f"the disk of the storage root has {size(free or 0)} left", sign=-1),
    ]
    if gpu is not None:
        full = 100 * gpu.memory / gpu.memory_total if gpu.memory_total else None
        found.append(GPU_MEMORY.alarm(full, f"memory of the GPU is {full or 0:.0f} % full"))
        found.append(GPU_HEAT.alarm(gpu.celsius, f"the GPU has {gpu.celsius:.0f} degrees Celsius"))
    return [alarm for alarm in found if alarm is not None]


def render() -> None:
    """The page."""
    state.live(_now, EVERY_S)


def _now() -> None:
    reading, gpu = machine().read(), machine().gpu()
    for alarm in alarms(reading, gpu):
        (st.error if alarm.critical else st.warning)(f"{alarm.text}: {alarm.remedy}")
    used = f"{size(reading.memory_used)} of {size(reading.memory_total)}"
    session = state.chosen()
    run = run_bytes(session) if session else None
    numbers = {
        "processor": _percent(reading.cpu),
        "memory": f"{reading.memory:.0f} %",
        "this dashboard": size(reading.own),
        "the chosen run": "-" if run is None else size(run),
        "disk left": "-" if reading.free is None else size(reading.free),
        "GPU": _percent(gpu.used if gpu else None),
        "GPU memory": f"{gpu.memory:.0f} MiB" if gpu else "-",
        "GPU heat": f"{gpu.celsius:.0f} C" if gpu else "-",
    }
    items = list(numbers.items())
    for first in (0, 4):
        for column, (label, value) in zip(st.columns(4), items[first : first + 4], strict=True):
            column.metric(label, value, border=True)
    st.caption(f"memory: {used}; readings begin when this page is opened")
    _history(list(machine().readings))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _history(readings: list[Reading]) -> None:
    """The last five minutes."""
    if len(readings) < 2:
        return
    along = [reading.at - readings[-1].at for reading in readings]
    rows: list[Any] = [("memory", "", along, [reading.memory for reading in readings])]
    rows += [("processor", "", along, [reading.cpu for reading in readings])]
    axes: dict[str, Any] = {"xaxis": {"range": [-KEPT_S, 0]}, "yaxis": {"range": [0, 105]}}
    told = f"n = {len(readings)} readings"
    figure = Look(state.theme()).lines(rows, told, "time before now (s)", "used (%)", **axes)
    state.draw(figure, "system-history")


def run_bytes(session: str) -> int | None:
    """What the processes of a run hold in memory; None if it does not run."""
    folder = state.store().path(session)
    pid = lock.announced(folder).get("pid") if lock.is_busy(folder) else None
    with contextlib.suppress(psutil.Error, ValueError):
        if pid is not None:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
            return sum(int(one.memory_info().rss) for one in family)
    return None
