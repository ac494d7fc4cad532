"""What the pages share: the runs that are read, the sidebar, problems, figures and tables."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from agent_forge.errors import ForgeError, NotFound
from agent_forge.pipeline.run_view import RunView, Series, all_runs
from agent_forge.store import lock
from agent_forge.store.sessions import SESSION_FILE, SessionStore
from agent_forge.ui.figures import Titled, figures_of
from agent_forge.ui.theme import cell, plain

FRESH_S = 0.5  # so long what was read of a run is taken for new
LIVE_S, FIGURES_S, WATCH_S = 2.0, 6.0, 3.0  # between looks at what changes
MOST_OPEN = 12  # runs that are kept open
MOST_ROWS = 500  # of a table
COLOURS = {
    "running": "blue",
    "completed": "green",
    "paused": "orange",
    "interrupted": "orange",
    "failed": "red",
    "damaged": "red",
    "waiting": "gray",
}
OF_STRANGE_RECORDS = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class OpenRun:
    """A run that everybody who looks at it reads together."""

    def __init__(self, store: SessionStore, session: str) -> None:
        self.view = RunView(store, session)
        self._lock, self._read_at = threading.Lock(), time.monotonic()
        self._figures: dict[tuple[str | None, str], tuple[Any, list[Titled]]] = {}

    @contextlib.contextmanager
    def reading(self) -> Iterator[RunView]:
        """The run as its files are now; it does not change within the block."""
        with self._lock:
            old = time.monotonic() - self._read_at > FRESH_S
            if old or lock.is_busy(self.view.folder) != self.view.is_live:
                self.view.refresh()
                self._read_at = time.monotonic()
            yield self.view

    def figures(self, phase: str | None, theme: str) -> list[Titled]:
        """The figures of the run or a phase, drawn again if anything was measured; called within
        `reading`."""
        count = sum(series.count for series in self.view.series.values())
        known = (count, len(self.view.events), [(p.name, p.status) for p in self.view.phases])
        kept = self._figures.get((phase, theme))
        if kept is None or kept[0] != known:
            kept = self._figures[phase, theme] = known, figures_of(self.view, phase, theme)
        return kept[1]


def root() -> Path:
    """The storage root, as `forge dashboard` was told."""
    return Path(os.environ.get("FORGE_STORAGE", "storage"))


@st.cache_resource(show_spinner=False)
def _store(place: str) -> SessionStore:
    return SessionStore(place)


def store() -> SessionStore:
    return _store(str(root()))


@st.cache_resource(max_entries=MOST_OPEN, show_spinner=False)
def _open(place: str, session: str) -> OpenRun:
    return OpenRun(_store(place), session)


@contextlib.contextmanager
def opened(session: str) -> Iterator[OpenRun]:
    """A run, read; nobody else reads it meanwhile."""
    found = _open(str(root()), session)
    try:
        with found.reading():
            yield found
    except NotFound:  # it was removed
        _open.clear(str(root()), session)
        raise


@contextlib.contextmanager
def reading(session: str) -> Iterator[RunView]:
    """The view of a run as its files are now."""
    with opened(session) as run:
        yield run.view


def is_live(session: str) -> bool:
    """True while a process works on a run."""
    with contextlib.suppress(ForgeError, OSError):
        return lock.is_busy(store().path(session))
    return False


# -- the sidebar -----------------------------------------------------------------------------------


def sidebar() -> None:
    """Which run is looked at, and how it stands."""
    wanted = st.session_state.pop("go_to", None)
    known = wanted or st.session_state.get("watched")  # "run" is a label until its field is shown
    standing = _standing(known)  # before what is shown: whatever changes then is seen
    rows = {str(row["session_id"]): str(row["status"]) for row in all_runs(store())}
    if wanted in rows:
        st.session_state["run"] = wanted
    with st.sidebar:
        label = {name: f"{plain(name)}  ({plain(status)})" for name, status in rows.items()}
        options: dict[str, Any] = {"format_func": lambda name: label.get(name, name)}
        st.selectbox("Run", list(rows), key="run", placeholder="no runs yet", **options)
        st.session_state["watched"] = chosen()
        _watch(chosen(), standing if chosen() == known else _standing(chosen()), [True])
        st.caption("Storage root")
        st.text(str(root()))


def chosen() -> str | None:
    """The run that is looked at."""
    name: str | None = st.session_state.get("run")
    return name


def go_to(session: str) -> None:
    """Look at this run from now on."""
    st.session_state["go_to"] = session
    st.rerun()


@st.fragment(run_every=WATCH_S)
def _watch(session: str | None, standing: Any, first: list[bool]) -> None:
    """How the run stands; the whole page is shown again when a run begins, ends or is new, but not
    the first time: the rest of the page would never learn of the click that it is made for."""
    if not first and _standing(session) != standing:
        st.rerun()
    first.clear()
    if session is not None:
        with contextlib.suppress(ForgeError, OSError), reading(session) as view:
            badge(view.status)
            if view.progress is not None:
                st.progress(min(1.0, max(0.0, view.progress)), text=f"{view.progress:.0%} done")


def _standing(session: str | None) -> Any:
    """Changes when a run is added or removed, when this one begins or ends, and when the theme that
    figures are drawn for is another one."""
    sessions = root() / "sessions"
    places = [sessions, *([sessions / session / SESSION_FILE] if session else [])]
    times: list[int] = []
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            times.append(place.stat().st_mtime_ns)
    return times, session and is_live(session), theme()


# -- on a page -------------------------------------------------------------------------------------


def theme() -> str:
    """Light or dark, as the browser shows it."""
    return "dark" if st.context.theme.type == "dark" else "light"


def live(part: Callable[..., None], every: float | None, *about: Any) -> None:
    """A part of a page that is shown again by itself, if `every` says how often; problems of what
    it shows are shown in its place."""

    def shown() -> None:
        with problems():
            part(*about)

    shown.__qualname__ = f"{part.__module__}.{part.__qualname__}"
    st.fragment(shown, run_every=every)()


@contextlib.contextmanager
def problems(what: str = "This cannot be shown") -> Iterator[None]:
    """Say what is wrong instead of what the block would have shown."""
    try:
        yield
    except ForgeError as error:
        problem(what, str(error), error.hint)
    except OSError as error:
        problem(what, f"{error.strerror or error}: {error.filename or ''}")
    except OF_STRANGE_RECORDS as error:  # a record of another making
        problem(what, f"a record is not as it should be ({type(error).__name__}: {error})")


def problem(what: str, text: str, hint: str = "") -> None:
    """What is wrong, as it was said: text that has names from files is never Markdown."""
    st.error(what, icon=":material/error:")
    st.code(f"{text}\nnext: {hint}" if hint else text, language=None, wrap_lines=True)


def badge(status: str) -> None:
    """A status; one that is not known as plain text."""
    if status in COLOURS:
        st.badge(status, color=COLOURS[status])  # type: ignore[arg-type]
    else:
        st.text(plain(status))


def figures(titled: Sequence[Titled], key: str) -> None:
    """Figures with their titles, two in a row."""
    for first in range(0, len(titled), 2):
        for column, (title, figure) in zip(st.columns(2), titled[first : first + 2], strict=False):
            with column:
                st.markdown(f"**{title}**")
                draw(figure, f"{key}-{title}")


def along(series: Series) -> tuple[list[float], str]:
    """What a metric is drawn over, with its unit: its steps, or the time if it has none."""
    steps = [float(step) for step in series.steps if step is not None]
    if len(steps) == len(series.values):
        return steps, "step"
    return [at - series.times[0] for at in series.times], "time since the first (s)"


def draw(figure: Any, key: str) -> None:
    bar = {"displaylogo": False, "modeBarButtons": [["toImage", "resetScale2d"]]}  # beside legends
    st.plotly_chart(figure, theme=None, key=key, config=bar)


def table(rows: Sequence[Sequence[Any]], key: str | None = None) -> None:
    """A table whose first row has the names of the columns; its cells are plain text."""
    head, *body = rows
    names = [f"{cell(name)}{' ' * list(head[:i]).count(name)}" for i, name in enumerate(head)]
    told = [[cell(value, 400) for value in row] for row in body[:MOST_ROWS]]
    columns = {
        name: [row[i] if i < len(row) else "-" for row in told] for i, name in enumerate(names)
    }
    st.dataframe(columns, hide_index=True, key=key)
    if len(body) > MOST_ROWS:
        st.caption(f"the first {MOST_ROWS} of {len(body):,} rows")


def number(value: object) -> str:
    """A number of a record as people read it; `-` for anything else."""
    return cell(float(value)) if isinstance(value, int | float) else "-"


def moment(epoch_s: Any) -> str:
    """A time as people read it, in UTC; `-` if it is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(epoch_s)) if epoch_s else "-"
    except (TypeError, ValueError, OverflowError, OSError):
        return "-"
