"""Tools: each does its work, and no call, file or function can hurt whoever carries it out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from agent_forge.errors import ConfigError
from agent_forge.infer import builtin_tools as builtin
from agent_forge.infer import tools
from agent_forge.infer.tools import Tool, Toolbox, ToolError, ToolResult, builtin_tools, own_tools

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs process groups and pipes")
STOCK = {"beet": {"code": "B7", "price": 2.5}, "leek": {"code": "L1"}, "open": True}
SLEEP = f"77.{os.getpid()}"  # seconds that no other process sleeps
OWN = '''
"""Tools of a user."""
import os, subprocess, sys, time

SLEEP = "<seconds>"
SECRET = "not a function"

def area(width: float, height: float = 1.5) -> float:
    """The area of a field.

    More than the first line is not told.
    """
    print("noise")
    return width * height

def greet(name: str, *, loud: bool = False, times: int = 1) -> str:
    return " ".join([name.upper() if loud else name] * times)

def nothing(): pass

def neighbour() -> str:
    import beside
    return beside.WORD

def asks() -> str:
    return input()

def fails(why: str):
    raise ValueError(f"no\\nreason: {why}")

def ends(how: str):
    {"exit": sys.exit, "_exit": os._exit}[how](0)

def crash():
    os.kill(os.getpid(), 11)

def hang():
    subprocess.Popen(["sleep", SLEEP])
    while True:
        time.sleep(1)

def leaves() -> str:
    subprocess.Popen(["sleep", SLEEP])
    return "left"

def shout() -> str:
    for _ in range(1024):
        try:
            print("x" * (1 << 20))
        except OSError:
            pass
    return "shouted"

def fill(path: str):
    with open(path, "wb") as file:
        file.write(b"x" * (1 << 20))

def huge() -> str:
    return "x" * (8 << 20)

def hungry() -> int:
    return len(b"x" * (1 << 40))

def odd() -> str:
    return "a\\ud800b\\0c"

def _private(x): pass
'''


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process and no open descriptor afterwards."""
    before, known = psutil.Process().num_fds(), children()
    yield
    deadline = time.monotonic() + 2  # what was killed takes a moment to disappear
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not sleepers() and children() <= known
    assert psutil.Process().num_fds() == before


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", SLEEP]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "files"
    (place / "deep").mkdir(parents=True)
    (place / "stock.json").write_text(json.dumps(STOCK))
    (place / "list.json").write_text('[{"id": 7, "name": "Ann"}, {"id": 8, "town": "Ulm"}]')
    (place / "list.csv").write_text('\ufeffname,"unit price"\nbeet,2.50\n\n"red leek",3\n')
    (place / "notes.txt").write_text("one\nThe Blue House is old\n")
    (place / "deep" / "more.md").write_text("x" * 500 + " blue house " + "y" * 500)
    (place / "code.py").write_text("blue house")
    (tmp_path / "secret.json").write_text('{"a": "secret"}')
    return place


@pytest.fixture
def call(folder: Path) -> Callable[[str], ToolResult]:
    return Toolbox(builtin_tools(folder, lambda: datetime(2031, 4, 5, 6, 7))).call


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Toolbox:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(OWN.replace("<seconds>", SLEEP))
    path.with_name("beside.py").write_text("WORD = 'near'")
    return Toolbox(own_tools(path))


def refused(result: ToolResult) -> str:
    """The reason of an error, which is one short line."""
    assert not result.ok and result.text.startswith("error: ") and "\n" not in result.text
    assert len(result.text) <= tools.RESULT_CHARACTERS and result.text.encode()
    return result.text.removeprefix("error: ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("47 * 86", "4042"),
        ("7/2", "3.5"),
        ("6 / 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10 - (3 + 4.5) * 2", "1009"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.3333333333333333"),
        ("2 ** 0.5", "1.4142135623730951"),
        ("4 ** -0.5", "0.5"),
        ("2 ** -2", "0.25"),
        ("1 ** 999999999", "1"),
        ("2 ** 1000", str(2**1000)),
        ("12345678901234567890 * 10", "123456789012345678900"),
        ("+1.50", "1.5"),
        ("4503599627370497 + 3/4", "4503599627370498"),
        ("1e3", "1000"),
    ],
)
def test_calc(call: Callable[[str], ToolResult], text: str, value: str) -> None:
    expected = ToolResult(
        f"calc {text}", {"name": "calc", "arguments": {"expression": text}}, value, True
    )
    assert call(f"calc {text}") == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("9**9**9", "out of range"),
        ("(2**1000)**1000", "out of range"),
        ("1e300 * 1e300", "out of range"),
        ("2**-99999", "out of range"),
        ("(10**300) ** 1.5", "out of range"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("(-8) ** 0.5", "negative"),
        ("1e999", "range"),
        ("1 +", "expression"),
        ("007", "expression"),
        ("e", "expression"),
        ("()", "expression"),
        ("1e1(2)", "expression"),
        ("__import__('os')", "expression"),
        ("x = 1", "expression"),
        ("(" * 300, "expression"),
        ("1" * 401, "expression"),
        ("1\0", "expression"),
        ("\u0661 + 1", "expression"),
    ],
)
def test_calc_refuses(call: Callable[[str], ToolResult], text: str, reason: str) -> None:
    begin = time.monotonic()
    assert reason in refused(call(f"calc {text}"))
    assert time.monotonic() - begin < 0.5


def test_a_deep_expression_is_a_value_or_an_error(call: Callable[[str], ToolResult]) -> None:
    assert call("calc " + "-" * 100 + "1").text == "1"
    assert call("calc " + "-" * 399 + "1").text in (
        "-1",
        "error: this is not an arithmetic expression",
    )


def test_python(call: Callable[[str], ToolResult], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("python print(2**10)").text == "1024"
    assert call("python for n in range(2):\n    print(n)").text == "0\n1"
    assert len(call("python print('x' * 9999)").text) == tools.RESULT_CHARACTERS
    assert refused(call("python 1 / 0")) == "ZeroDivisionError: division by zero"
    assert refused(call("python import os; os._exit(3)")) == "it ended with exit code 3"
    assert refused(call("python while True: print('x' * 9999)")) == "it printed too much"
    assert refused(call("python x = 'x' * (1 << 40)")) == "it needs too much memory"
    assert refused(call("python print('\0')"))
    monkeypatch.setattr(tools, "TIME_LIMIT_S", 0.2)
    assert refused(call("python while True: pass")) == "it took longer than 0.2 s"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("stock.json beet code", "B7"),
        ("stock.json beet price", "2.5"),
        ("stock.json leek", '{"code": "L1"}'),
        ("stock.json open", "true"),
        ("list.json Ann id", "7"),
        ("list.json 8 town", "Ulm"),
        ("list.csv beet unit price", "2.50"),
        ("deep/../list.csv beet name", "beet"),
    ],
)
def test_read(call: Callable[[str], ToolResult], text: str, value: str) -> None:
    assert call(f"read {text}").text == value


def test_read_takes_no_guesses(call: Callable[[str], ToolResult], folder: Path) -> None:
    """Two columns of one name are refused; spaces in a head and the form of a number stay out."""
    (folder / "two.csv").write_text("name,shelf,shelf\nboat,1,2\n")
    (folder / "wide.csv").write_text("name, shelf\nboat,1\n")
    (folder / "forms.json").write_text('{"a": 1e2, "b": 12345678901234567.891}')
    assert "one name" in refused(call("read two.csv boat shelf"))
    assert call("read wide.csv boat shelf").text == "1"
    assert [call(f"read forms.json {k}").text for k in "ab"] == ["1e2", "12345678901234567.891"]


@pytest.mark.skipif(os.open not in os.supports_dir_fd, reason="needs openat")
def test_a_folder_that_becomes_a_link_meanwhile_is_refused(
    call: Callable[[str], ToolResult], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path was looked at and found to be inside; then it leads out."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "s.json").write_text('{"k": "secret"}')
    (folder / "d").symlink_to(outside)
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: path)
    assert "secret" not in call("read d/s.json k").text and not call("read d/s.json k").ok


def test_read_says_what_is_wrong(call: Callable[[str], ToolResult], folder: Path) -> None:
    assert "there are: beet, leek, open" in refused(call("read stock.json kale"))
    assert "there are: code, price" in refused(call("read stock.json beet colour"))
    assert "there are none" in refused(call("read stock.json open code"))
    assert "no file 'none.json'" in refused(call("read none.json a"))
    assert "only .json and .csv" in refused(call("read notes.txt one"))
    for content in ('{"a": ', "[1]", "[{}]", '{"a": NaN}', "[" * 9999, '{"a": 1, "a": 2}', ""):
        (folder / "bad.json").write_text(content)
        assert "damaged" in refused(call("read bad.json a"))
    (folder / "bad.csv").write_text('a,b\n"x')
    assert "damaged" in refused(call("read bad.csv x"))
    (folder / "bad.csv").write_bytes(b"")
    assert "there are none" in refused(call("read bad.csv x"))
    (folder / "bad.json").write_bytes(b'{"a": "\xff\x00"}')
    assert refused(call("read bad.json a"))


def test_read_stays_in_its_folder(
    call: Callable[[str], ToolResult], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = folder.parent / "secret.json"
    (folder / "link.json").symlink_to(outside)
    (folder / "up").symlink_to(folder.parent)
    (folder / "inside.json").symlink_to("stock.json")
    for name in ("../secret.json", str(outside), "link.json", "up/secret.json", "../none.json"):
        assert "outside" in refused(call(f"read {name} a")), name
    assert call("read inside.json beet code").text == "B7"
    (folder / "circle.json").symlink_to("circle.json")
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    for name in ("circle.json", "pipe.json", "folder.json", "a\0.json", "n" * 5000 + ".json"):
        assert refused(call(f"read {name} a")), name
    monkeypatch.setattr(builtin, "FILE_BYTES", 20)
    assert "larger than" in refused(call("read stock.json beet"))


def test_find(call: Callable[[str], ToolResult], folder: Path) -> None:
    first, second = call("find blue HOUSE").text.split("\n")
    assert first == "notes.txt:2: The Blue House is old"
    assert second.startswith("deep/more.md:1: xxx") and " blue house y" in second
    assert len(second) < 100
    (folder / "many.txt").write_text("blue house\n" * 9)
    assert call("find blue house").text == "\n".join(
        f"many.txt:{n}: blue house" for n in range(1, 6)
    )
    assert call("find code.py") == ToolResult(
        "find code.py", {"name": "find", "arguments": {"text": "code.py"}}, "nothing found", True
    )
    assert refused(call('{"name": "find", "arguments": {"text": " "}}'))


def test_find_stays_in_its_folder(call: Callable[[str], ToolResult], folder: Path) -> None:
    (folder / "link.json").symlink_to(folder.parent / "secret.json")
    (folder / "up").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe.txt")
    (folder / "folder.txt").mkdir()
    (folder / "raw.txt").write_bytes(b"\xff\x00 found")
    assert call("find secret").text == "nothing found"
    assert call("find found").text.startswith("raw.txt:1: ")


def test_the_work_of_find_is_bounded(
    call: Callable[[str], ToolResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name, value in (
        (builtin, "FILE_BYTES", 30),
        (builtin, "FILE_BYTES", 1100),  # enough for each file, not for all
        (builtin, "MAX_ENTRIES", 3),
        (tools, "TIME_LIMIT_S", -1.0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert "too large" in refused(call("find absent"))
    assert call("find absent").ok


def test_without_a_folder_nothing_is_read() -> None:
    toolbox = Toolbox(builtin_tools())
    assert refused(toolbox.call("read stock.json beet")) == "no folder was given"
    assert refused(toolbox.call("find beet")) == "no folder was given"
    assert toolbox.call("clock").text[:2] == "20"


def test_clock(call: Callable[[str], ToolResult]) -> None:
    assert call(" clock\n").text == "2031-04-05 06:07"
    assert refused(call("clock now")) == "clock takes no arguments"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5 km m", "5000"),
        ("0.1 km m", "100"),
        ("1 mile km", "1.609344"),
        ("12 inch foot", "1"),
        ("1 yard cm", "91.44"),
        ("1 lb oz", "16"),
        ("2500 ml L", "2.5"),
        ("36 h day", "1.5"),
        ("100 C F", "212"),
        ("-40 f c", "-40"),
        ("0 c k", "273.15"),
        ("12345678901234567890 m km", "1.2345678901234568e+16"),
        ("1e3 mm m", "1"),
    ],
)
def test_conv(call: Callable[[str], ToolResult], text: str, value: str) -> None:
    assert call(f"conv {text}").text == value


def test_conv_refuses(call: Callable[[str], ToolResult]) -> None:
    assert "no unit 'parsec'" in refused(call("conv 5 km parsec"))
    assert refused(call("conv 5 km kg")) == "km is a length, kg is a mass"
    assert "write: conv amount unit to" in refused(call("conv 5 km"))
    for amount in ("five", "nan", "inf", "1_0", "0x1", "1.2.3", "--1", "1e99999999999", "true"):
        assert "is no number" in refused(call(f"conv {amount} km m"))
    for amount in ("1e308", "1e999", "9" * 5000):
        assert "range" in refused(call(f"conv {amount} km mm"))
    assert "below absolute zero" in refused(call("conv -500 c k"))


def test_numbers_are_exact(call: Callable[[str], ToolResult]) -> None:
    for text, result in {
        "calc 12345678901234567890.5*2": "24691357802469135781",
        "calc 9007199254740993.0": "9007199254740993",
        "calc 64**(1/3)": "4",
        "calc 0.1+0.2": "0.3",
        "conv 12345678901234567.5 m mm": "12345678901234567500",
    }.items():
        assert call(text).text == result
    assert "range" in refused(call("calc 1e-400000"))


def test_calls_that_cannot_be_read(call: Callable[[str], ToolResult]) -> None:
    for text, reason in {
        "": "the call is empty",
        " \n": "the call is empty",
        "cal 1": "there is no tool 'cal'; there are: calc, python, read, find, clock, conv",
        "calc": "expression is missing; write: calc expression",
        "read stock.json": "key is missing; write: read file key [field]",
        "calc \ud800": "surrogate",
        "\udfff": "no tool",
        "\0": "no tool",
        "calc " + "1" * 1_000_000: "at most 10,000 characters",
        "[]": "no tool",
        "{": "not JSON",
        "{" * 9000: "not JSON",
        '{"name": 1}': "a call is",
        '{"arguments": {}}': "a call is",
        '{"name": "calc", "arguments": ["1"]}': "a call is",
        '{"name": "calc", "arguments": "1"}': "a call is",
        '{"name": "none", "arguments": {}}': "no tool 'none'",
        '{"name": "calc", "arguments": {}}': "expression is missing",
        '{"name": "calc", "arguments": {"expression": "1", "x": 2}}': "no argument 'x'",
        '{"name": "calc", "arguments": {"expression": null}}': "expression is no string",
        '{"name": "calc", "arguments": {"expression": "\\ud800"}}': "surrogate",
    }.items():
        result = call(text)
        assert reason in refused(result), text[:80]
        assert result.request == {} and result.call == text


def test_calls_in_json(call: Callable[[str], ToolResult]) -> None:
    request = {"name": "conv", "arguments": {"amount": "5", "unit": "km", "to": "m"}}
    text = json.dumps(request).replace('"5"', "5")
    assert call(text) == ToolResult(text, request, "5000", True)
    assert call('{"name": "clock"}').ok
    assert call('{"name": "calc", "arguments": {"expression": 12}}').text == "12"


def test_a_tool_in_this_process_may_raise_what_it_likes() -> None:
    def raising(error: BaseException) -> Tool:
        def run() -> str:
            raise error

        return Tool("it", "", {"type": "object", "properties": {}}, run)

    for error, text in (
        (ToolError("not\ntoday"), "not today"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (MemoryError(), "MemoryError:"),
    ):
        result = Toolbox([raising(error)]).call("it")
        assert refused(result) == text and result.request == {"name": "it", "arguments": {}}
    with pytest.raises(KeyboardInterrupt):
        Toolbox([raising(KeyboardInterrupt())]).call("it")


def test_a_result_is_valid_text() -> None:
    tool = Tool("it", "", {"type": "object", "properties": {}}, lambda: "a\ud800b \n")
    assert Toolbox([tool]).call("it").text == "a?b"


def test_names_are_unique(own: Toolbox) -> None:
    with pytest.raises(ConfigError, match="two tools are called 'calc'"):
        Toolbox([*builtin_tools(), *builtin_tools()[:1]])
    assert own.names[:3] == ("area", "greet", "nothing") and "_private" not in own.names


def test_the_schema_of_a_tool(own: Toolbox) -> None:
    properties = {"width": {"type": "number"}, "height": {"type": "number"}}
    parameters = {"type": "object", "properties": properties, "required": ["width"]}
    function = {"name": "area", "description": "The area of a field.", "parameters": parameters}
    assert own.tools["area"].schema() == {"type": "function", "function": function}
    assert own.tools["greet"].parameters["required"] == ["name"]
    schemas = [tool.schema()["function"] for tool in builtin_tools()]
    assert all(schema["description"] for schema in schemas)
    assert schemas[2]["parameters"]["required"] == ["file", "key"]
    json.dumps(schemas)


def test_own_tools(own: Toolbox) -> None:
    assert own.call("area 2 4").text == "8"
    assert own.call("area 3") == ToolResult(
        "area 3", {"name": "area", "arguments": {"width": 3}}, "4.5", True
    )
    assert own.call("greet Ann yes 2").text == "ANN ANN"
    assert refused(own.call("greet Ann maybe")) == "loud is 'maybe', which is no boolean"
    assert refused(own.call("greet Ann no 1.5")) == "times is '1.5', which is no integer"
    assert own.call("nothing").text == "" and own.call("neighbour").text == "near"
    assert own.call("odd").text == "a?b\0c"
    assert refused(own.call("asks")).startswith("EOFError")
    assert refused(own.call("fails so")) == "ValueError: no reason: so"


def test_own_tools_that_end_the_process(own: Toolbox) -> None:
    for how in ("exit", "_exit"):
        assert refused(own.call(f"ends {how}")) == "it ended with exit code 0, without a result"
    assert refused(own.call("crash")) == "it ended with exit code -11, without a result"


def test_an_own_tool_that_does_not_end(own: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "TIME_LIMIT_S", 0.5)
    begin = time.monotonic()
    assert refused(own.call("hang")) == "it took longer than 0.5 s"
    assert time.monotonic() - begin < 3


def test_what_an_own_tool_started_ends_with_it(own: Toolbox) -> None:
    assert own.call("leaves").text == "left"


def test_own_tools_that_want_too_much(
    own: Toolbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = own.call("huge").text
    assert len(told) == tools.RESULT_CHARACTERS and told.endswith(f"x{tools.CUT}")
    assert refused(own.call("hungry")).startswith("MemoryError")
    monkeypatch.setattr(tools, "OUTPUT_BYTES", 1 << 16)
    assert refused(own.call("shout")) == "it printed too much"
    assert own.call(f"fill {tmp_path / 'full'}").ok  # its own files are its own affair
    assert (tmp_path / "full").stat().st_size > tools.OUTPUT_BYTES


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("def f(x): return x", "x has no hint"),
        ("def f(x: list) -> str: ...", "x has the hint list"),
        ("def f(*x: str) -> str: ...", "by the names"),
        ("def f(x: str, /) -> str: ...", "by the names"),
        ("async def f(x: str) -> str: ...", "by the names"),
        ("x = 1\ndef _f(x: str) -> str: ...", "has no tools"),
        ("", "has no tools"),
        ("def f(x: str", "was never closed"),
        ("\0", "null bytes"),
        ("import no_such_module\ndef f() -> str: ...", "cannot be imported: ModuleNotFoundError"),
        ("import os; os._exit(0)\ndef f() -> str: ...", "cannot be imported: it ended"),
        ("while True: pass\ndef f() -> str: ...", "cannot be imported: it took longer"),
    ],
)
def test_files_without_tools(
    tmp_path: Path, content: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "TIME_LIMIT_S", 0.5)
    path = tmp_path / "mine.py"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        own_tools(path)
    assert "mine.py" in str(caught.value)


def test_no_file_of_tools(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("none.py", "pipe.py", ".", "a\0"):
        with pytest.raises(ConfigError, match="cannot read the tools"):
            own_tools(tmp_path / name)


def test_the_signature_of_an_own_tool(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def f(x: 'str', y: int = 1, *, z: bool, name: float = 0.5) -> str: return name"
    )
    (tool,) = own_tools(path)
    kinds = {name: kind["type"] for name, kind in tool.parameters["properties"].items()}
    assert kinds == {"x": "string", "y": "integer", "z": "boolean", "name": "number"}
    assert tool.parameters["required"] == ["x", "z"] and tool.description == ""
    assert Toolbox([tool]).call("f a 1 yes 2.5").text == "2.5"
