"""Rows from an endpoint: no request is paid twice, the cap holds over all runs, nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_forge.data import endpoint_rows
from agent_forge.data.endpoint import Endpoint, EndpointSettings
from agent_forge.data.endpoint_rows import GeneratedRows, generate_rows, journal_path, read_journal
from agent_forge.errors import (
    AlreadyExists,
    AlreadyInUse,
    CannotWrite,
    CostCapReached,
    DamagedFile,
    DiskFull,
    EndpointFailed,
    HostileInput,
    Interrupted,
    WrittenByNewerVersion,
)
from agent_forge.store import files
from tests.support.chat_server import (
    KEY,
    ChatServer,
    FakeClock,
    Question,
    answer,
    body,
    chat_server,
    completion,
    hang,
    repeat_key,
    status,
)
from tests.support.faults import FailingDisk
from tests.support.polling import until

QUESTIONS = [Question(f"q{n}") for n in range(6)]
ROWS = [{"q": q.key, "a": f"<{q.key}>"} for q in QUESTIONS]
Run = Callable[..., GeneratedRows]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "made" / "rows.jsonl"


def accept(request: Question, text: str) -> dict[str, Any]:
    if "wrong" in text:
        raise ValueError("the answer is wrong")
    return {"q": request.key, "a": text}


def endpoint_of(server: ChatServer, **changes: Any) -> Endpoint:
    usual = {"base_url": server.url, "models": ["lab/free"], "timeout_s": 5, "retries": 1}
    return Endpoint(EndpointSettings(**{**usual, **changes}), FakeClock())


@pytest.fixture
def run(server: ChatServer, out: Path) -> Run:
    def generate(questions: list[Question] = QUESTIONS, **changes: Any) -> GeneratedRows:
        return generate_rows(endpoint_of(server, **changes), questions, accept, out)

    return generate


def rows_in(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- what is kept ----------------------------------------------------------------------------------


def test_rows_are_kept_and_rejections_counted(server: ChatServer, run: Run, out: Path) -> None:
    cut_off = body(completion(finish="length"))
    server.script = [answer(), answer("wrong"), cut_off, answer(), answer("wrong"), answer()]
    found = run()
    assert found == (3, {"the answer is wrong": 2, "the answer ended by length": 1}, 0.0)
    assert rows_in(out) == [ROWS[0], ROWS[3], ROWS[5]]
    done = [r for r in read_journal(out) if r["record"] == "done"]
    assert [r["key"] for r in done] == [q.key for q in QUESTIONS]
    assert done[2]["rejected"] == "the answer ended by length" and done[0]["prompt_tokens"] == 10


def test_a_finished_file_asks_nothing(server: ChatServer, run: Run, out: Path) -> None:
    server.script = [answer("wrong")]
    first = run()
    content = out.read_bytes()
    assert run() == first and len(server.asked) == len(QUESTIONS)
    assert out.read_bytes() == content
    more = [*QUESTIONS, Question("more"), Question("more")]
    assert run(more).accepted == 6 and server.questions["more"] == 1


def test_models_take_turns_and_keep_them(server: ChatServer, run: Run) -> None:
    models = ["lab/free", "lab/unpriced"]
    server.script = [answer()] * 3 + [status(400)]
    with pytest.raises(EndpointFailed):
        run(models=models)
    run(models=models)
    asked = {b["messages"][0]["content"]: b["model"] for b in server.asked}
    assert list(asked.values()) == models * 3


def test_what_cannot_be_a_row_is_a_rejection(server: ChatServer, out: Path) -> None:
    def strange(request: Question, text: str) -> dict[str, Any]:
        if request.key == "q0":
            return {"value": float("nan")}
        raise ValueError(f"{'long ' * 100}")

    found = generate_rows(endpoint_of(server), QUESTIONS[:2], strange, out)
    assert found.accepted == 0 and out.read_bytes() == b""
    not_json, long = found.rejected
    assert "JSON" in not_json and len(long) == 100


def test_an_endpoint_that_only_sends_rubbish_is_left(server: ChatServer, run: Run) -> None:
    server.script = [body(b"<html>")] * 60
    questions = [Question(f"n{n}") for n in range(60)]
    with pytest.raises(EndpointFailed, match=r"the last 20 replies were no answers .*not JSON"):
        run(questions)
    assert len(server.asked) == 20
    server.script = ([body(b"<html>")] * 19 + [answer("wrong")]) * 3
    assert run(questions).accepted == 0


def test_the_key_is_in_no_file(
    server: ChatServer, run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_ENDPOINT_KEY", KEY)
    server.script = [repeat_key(200), repeat_key(500), repeat_key(400)]
    with pytest.raises(EndpointFailed):
        run()
    assert set(server.keys) == {f"Bearer {KEY}"}
    contents = [path.read_text() for path in out.parent.iterdir()]
    assert len(contents) == 2 and not any(KEY in content for content in contents)
    assert "***" in rows_in(out)[0]["a"]


# -- the cap ---------------------------------------------------------------------------------------

WORST = (len(str(QUESTIONS[0].messages)) + 256) * 1e-6 + 100 * 2e-6
PAID = {"models": ["lab/paid"], "max_tokens": 100}


@pytest.mark.parametrize("cap", [0.5, 1.0, 2.7, 4.2, 40.0])
def test_the_cap_is_never_passed(cap: float, server: ChatServer, run: Run, out: Path) -> None:
    """Whatever the endpoint does, and however often it is begun again: billed <= counted <= cap."""
    cap_usd, completed = cap * WORST + 1e-9, False
    for _ in range(8):
        dear = answer(prompt_tokens=200, completion_tokens=100)
        server.script = [answer(), hang, status(500), dear, status(429), answer(), hang, dear]
        try:
            found = run(**PAID, cost_cap_usd=cap_usd, timeout_s=0.1)
            completed = found.accepted == len(QUESTIONS)
        except (CostCapReached, EndpointFailed):
            pass
        spent = endpoint_rows.spent_usd(read_journal(out))
        assert server.billed_usd <= spent <= cap_usd
    assert completed == (cap == 40.0)
    asked = len(server.asked)
    server.script = []
    if not completed:
        with pytest.raises(CostCapReached):
            run(**PAID, cost_cap_usd=cap_usd)
        assert len(server.asked) == asked
    assert run(**PAID, cost_cap_usd=1).accepted == len(QUESTIONS)  # a higher one goes on
    assert rows_in(out) == ROWS


def test_what_was_under_way_counts_at_its_worst(server: ChatServer, run: Run, out: Path) -> None:
    server.script = [answer(), hang]
    with pytest.raises(EndpointFailed):
        run(**PAID, cost_cap_usd=1, timeout_s=0.1, retries=0)
    assert endpoint_rows.spent_usd(read_journal(out)) == pytest.approx(20e-6 + WORST)
    found = run(**PAID, cost_cap_usd=1)
    assert found.spent_usd == pytest.approx(6 * 20e-6 + WORST)


def test_a_request_is_in_the_journal_before_it_is_sent(
    server: ChatServer, run: Run, out: Path
) -> None:
    seen: list[list[str]] = []

    def look(handler: Any) -> None:
        seen.append([f"{r['record']} {r['key']}" for r in read_journal(out)])
        answer()(handler)

    server.script = [look, look]
    run(QUESTIONS[:2], **PAID, cost_cap_usd=1)
    assert seen == [["sent q0"], ["sent q0", "done q0", "sent q1"]]


def test_each_record_is_on_the_disk_before_the_next_step(
    server: ChatServer, run: Run, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    class Watching(files.FileSystemCalls):
        def sync(self, fd: int) -> None:
            steps.append("sync")
            super().sync(fd)

    def look(handler: Any) -> None:
        steps.append("asked")
        answer()(handler)

    server.script = [look, look]
    monkeypatch.setattr(files, "disk", Watching())
    run(QUESTIONS[:2])
    #                of the new journal; sent, the request, done; at last the rows
    assert steps == ["sync", *["sync", "asked", "sync"] * 2, "sync"]


# -- killed and begun again ------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("at", [0, 3, 5])
def test_killed_it_goes_on(at: int, server: ChatServer, run: Run, out: Path) -> None:
    """Only the request that was under way is asked a second time."""
    server.script = [answer()] * at + [hang]
    pid = os.fork()
    if not pid:
        try:
            run(**PAID, cost_cap_usd=1)
        finally:
            os._exit(1)
    until(lambda: len(server.asked) == at + 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (rows_in(out) if out.exists() else []) == ROWS[:at]
    found = run(**PAID, cost_cap_usd=1)
    assert rows_in(out) == ROWS
    expected = {question.key: 1 for question in QUESTIONS} | {f"q{at}": 2}
    assert server.questions == expected
    assert server.billed_usd <= found.spent_usd == pytest.approx(6 * 20e-6 + WORST)


@pytest.mark.parametrize("short", [False, True])
def test_any_failure_of_the_disk_loses_nothing(
    short: bool, server: ChatServer, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The N-th call fails, N = 1, 2, 3 ...; the next run asks at most one request again."""
    fail_at, questions = 0, QUESTIONS[:2]
    while True:
        fail_at += 1
        place = tmp_path / f"at{fail_at}" / "rows.jsonl"
        disk = FailingDisk(fail_at, errno.ENOSPC, once=False, short=short)
        with monkeypatch.context() as patched:
            patched.setattr(files, "disk", disk)
            with contextlib.suppress(DiskFull, CannotWrite):
                generate_rows(endpoint_of(server), questions, accept, place)
        server.asked.clear()
        paid = [r["key"] for r in read_journal(place) if r["record"] == "done"]
        generate_rows(endpoint_of(server), questions, accept, place)
        assert rows_in(place) == ROWS[:2]
        assert set(server.questions) == {q.key for q in questions} - {*paid}
        if not disk.failures:
            break
    assert fail_at > 10


def test_a_stop_keeps_what_is_done(server: ChatServer, out: Path) -> None:
    endpoint = endpoint_of(server)
    endpoint._should_stop = lambda: len(server.asked) >= 2
    with pytest.raises(Interrupted):
        generate_rows(endpoint, QUESTIONS, accept, out)
    assert rows_in(out) == ROWS[:2]


def test_half_a_row_is_written_again(server: ChatServer, run: Run, out: Path) -> None:
    run()
    content = out.read_bytes()
    for cut in (0, 5, len(content) - 1, content.index(b"\n") + 3):
        out.write_bytes(content[:cut])
        run()
        assert out.read_bytes() == content
    out.unlink()
    run()
    assert out.read_bytes() == content and len(server.asked) == len(QUESTIONS)


def test_half_a_line_of_the_journal_is_cut(server: ChatServer, run: Run, out: Path) -> None:
    run()
    journal = journal_path(out)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:-1]))
    assert run().accepted == 6 and server.questions["q5"] == 2 and rows_in(out) == ROWS


# -- files of others -------------------------------------------------------------------------------


def test_a_file_without_a_journal_stays(server: ChatServer, run: Run, out: Path) -> None:
    out.parent.mkdir()
    out.write_text("mine\n")
    with pytest.raises(AlreadyExists):
        run()
    assert out.read_text() == "mine\n" and server.asked == [] and not journal_path(out).exists()


def test_rows_that_were_edited_stay(server: ChatServer, run: Run, out: Path) -> None:
    run()
    for edited in (out.read_bytes() + b"mine\n", out.read_bytes().replace(b"<q1>", b"<qq>")):
        out.write_bytes(edited)
        with pytest.raises(DamagedFile, match="not those that were written"):
            run()
        assert out.read_bytes() == edited
    assert len(server.asked) == len(QUESTIONS)


@pytest.mark.parametrize("change", ["flip", "drop", "foreign", "empty", "newer", "link"])
def test_a_journal_that_is_not_as_it_was_written(
    change: str, server: ChatServer, run: Run, out: Path
) -> None:
    run(**PAID, cost_cap_usd=1)
    journal = journal_path(out)
    lines = journal.read_bytes().splitlines(keepends=True)
    kind: type[Exception] = DamagedFile
    if change == "flip":
        lines[2] = lines[2].replace(b'"usd":1', b'"usd":0')
        assert b'"usd":0' in lines[2]
    elif change == "drop":
        del lines[0]
    elif change == "foreign":
        lines = [b'{"mine": 1}']
    elif change == "empty":
        lines = []
    elif change == "newer":
        lines[0], kind = b'{"record": "begun", "schema_version": 2}\n', WrittenByNewerVersion
    journal.write_bytes(b"".join(lines))
    if change == "link":
        journal.rename(out.with_name("elsewhere"))
        journal.symlink_to("elsewhere")
        kind = HostileInput
    before = journal.read_bytes()
    with pytest.raises(kind, match=f"{journal.name} (is damaged|has schema 2|is a link)"):
        run(**PAID, cost_cap_usd=1)
    assert journal.read_bytes() == before and len(server.asked) == len(QUESTIONS)


def test_two_runs_never_share_a_file(server: ChatServer, run: Run, out: Path) -> None:
    def second(request: Question, text: str) -> dict[str, Any]:
        with pytest.raises(AlreadyInUse):
            run()
        return accept(request, text)

    generate_rows(endpoint_of(server), QUESTIONS, second, out)
    assert rows_in(out) == ROWS and len(server.asked) == len(QUESTIONS)
    assert run().accepted == 6  # the lock is free again
