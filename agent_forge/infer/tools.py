"""Tools that a model may call, and the box that reads its calls and always answers.

A call is `name word word ...`: the words are the arguments in order, the last one takes the rest.
A JSON object {"name": ..., "arguments": {...}} is read too. A user's own tools are functions of a
Python file; each of their calls runs in its own process, as nobody knows whether it ends.
"""

import ast
import functools
import inspect
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from agent_forge import platform
from agent_forge.config import strict_json
from agent_forge.errors import ConfigError, ForgeError
from agent_forge.infer.builtin_tools import (
    FILE_BYTES,
    ToolError,
    calc,
    conv,
    find_lines,
    read_file,
    read_value,
    run_python,
)

__all__ = ["Tool", "ToolError", "ToolResult", "Toolbox", "builtin_tools", "own_tools"]

TIME_LIMIT_S = 5.0
CALL_CHARACTERS = 10_000
RESULT_CHARACTERS = 400
OUTPUT_BYTES = 16 << 20  # that an own tool may print, looked at now and then
MEMORY_BYTES = 2 << 30  # of an own tool: address space, of which libraries take more than they use
LOOK_EVERY_S = 0.01
CUT = " ... (cut)"
HINTS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
WHOLE = re.compile(r"[+-]?[0-9]{1,300}")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
PYTHON = ("-I", "-B", "-X", "utf8")
# What an own tool prints goes to stderr; stdout has one reply: "=" and the result, "!" and the
# reason of an error. A process that leaves none has not returned from the function.
CHILD = """
import json, os, sys
request, answer = json.load(sys.stdin), os.dup(1)
os.dup2(2, 1)
try:
    import resource
except ImportError:
    request["limits"] = {}
for name, value in request["limits"].items():
    kind = getattr(resource, name)
    ceiling = resource.getrlimit(kind)[1]
    value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
    resource.setrlimit(kind, (value, value))
module = sys.modules["own_tools"] = type(sys)("own_tools")
module.__file__ = path = request["path"]
sys.path.append(os.path.dirname(path))
try:
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), module.__dict__)
    name = request["name"]
    value = module.__dict__[name](**request["arguments"]) if name else None
    reply = "=" if value is None else "=" + str(value)
    sys.stdout.flush()
except Exception as error:
    reply = f"!{type(error).__name__}: {error}"
os.write(answer, reply[:request["characters"]].encode("utf-8", "replace"))
os._exit(0)
"""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[..., str]

    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form, which chat templates know."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": told}


@dataclass(frozen=True)
class ToolResult:
    """What became of a call. `request` is empty if the call could not be read."""

    call: str
    request: dict[str, Any]
    text: str
    ok: bool


class Toolbox:
    """Tools by their names."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.names = tuple(self.tools)
        if len(self.names) < len(tools):
            names = [tool.name for tool in tools]
            twice = max(names, key=names.count)
            raise ConfigError(f"two tools are called {twice!r}", hint="rename one of them")

    def call(self, text: str) -> ToolResult:
        """Run the tool that a text calls; whatever the text and the tool do, nothing is raised."""
        request: dict[str, Any] = {}
        try:
            tool, arguments = self.read(text)
            request = {"name": tool.name, "arguments": arguments}
            told = _valid(str(tool.run(**arguments)).rstrip())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tool raises
            reason = str(error)
            if not isinstance(error, ForgeError):
                reason = f"{type(error).__name__}: {reason}"
            return ToolResult(text, request, _valid(" ".join(f"error: {reason}".split())), False)
        return ToolResult(text, request, told, True)

    def read(self, text: str) -> tuple[Tool, dict[str, Any]]:
        """The tool and the arguments of a call; a ToolError says why it is none."""
        if len(text) > CALL_CHARACTERS:
            raise ToolError(f"a call has at most {CALL_CHARACTERS:,} characters")
        if text.lstrip().startswith("{"):
            name, given = _read_json(text)
            tool = self._tool(name)
        else:
            name, rest = [*text.split(maxsplit=1), "", ""][:2]
            tool = self._tool(name)
            given = _read_words(tool, rest.strip())
        kinds = tool.parameters["properties"]
        for name in given:
            if name not in kinds:
                raise ToolError(f"{tool.name} has no argument {name[:40]!r}; {_usage(tool)}")
        missing = [name for name in tool.parameters.get("required", ()) if name not in given]
        if missing:
            raise ToolError(f"{missing[0]} is missing; {_usage(tool)}")
        values = {
            name: convert(given[name], kinds[name].get("type", "string"), name) for name in given
        }
        return tool, values

    def _tool(self, name: str) -> Tool:
        if name not in self.tools:
            known = ", ".join(self.names)
            wrong = f"there is no tool {name[:40]!r}" if name else "the call is empty"
            raise ToolError(f"{wrong}; there are: {known}")
        return self.tools[name]


def _read_json(text: str) -> tuple[str, dict[str, Any]]:
    try:
        call = strict_json.parse(text)
    except ValueError as error:
        raise ToolError(f"the call is not JSON: {error}") from None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ToolError('a call is {"name": text, "arguments": object}')
    return name, arguments


def _read_words(tool: Tool, text: str) -> dict[str, str]:
    names = list(tool.parameters["properties"])
    if text and not names:
        raise ToolError(f"{tool.name} takes no arguments")
    return dict(zip(names, text.split(maxsplit=len(names) - 1), strict=False))


def _usage(tool: Tool) -> str:
    required = tool.parameters.get("required", ())
    names = tool.parameters["properties"]
    words = [name if name in required else f"[{name}]" for name in names]
    return f"write: {' '.join([tool.name, *words])}"


def convert(value: Any, kind: str, name: str) -> str | int | float | bool:
    """A value of a call as its schema wants it; a whole number stays exact where any may stand."""
    if not isinstance(value, str | int | float):
        raise ToolError(f"{name} is no {kind}")
    text = value if isinstance(value, str) else json.dumps(value)
    if not _is_text(text):
        raise ToolError(f"{name} has half a surrogate pair")
    if kind == "string":
        return text
    if kind == "boolean" and text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    if kind in ("integer", "number") and WHOLE.fullmatch(text):
        return int(text)
    if kind == "number" and DECIMAL.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    raise ToolError(f"{name} is {text[:40]!r}, which is no {kind}")


def _is_text(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _valid(text: str) -> str:
    """A text as a model can be told it: without halves of surrogate pairs, and short; where the
    rest is missing it says so."""
    if len(text) > RESULT_CHARACTERS:
        text = text[: RESULT_CHARACTERS - len(CUT)] + CUT
    return text.encode("utf-8", "replace").decode()


def schema_of(kinds: Mapping[str, str], optional: Collection[str] = ()) -> dict[str, Any]:
    """The JSON schema of arguments with these types, in this order."""
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    required = [name for name in kinds if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def builtin_tools(
    folder: Path | None = None, now: Callable[[], datetime] = datetime.now
) -> list[Tool]:
    """The built-in tools; `read` and `find` see the files of `folder` and no others."""

    def python(code: str) -> str:
        """What a Python program prints."""
        return run_python(code, TIME_LIMIT_S)

    def read(file: str, key: str, field: str = "") -> str:
        """The value of a key, or of one of its fields, in a JSON or CSV file."""
        return read_value(folder, file, key, field)

    def find(text: str) -> str:
        """Lines of text files that contain a text."""
        return find_lines(folder, text, TIME_LIMIT_S)

    def clock() -> str:
        """The date and the time."""
        return now().strftime("%Y-%m-%d %H:%M")

    return [_builtin_tool(function) for function in (calc, python, read, find, clock, conv)]


def _builtin_tool(function: Callable[..., str]) -> Tool:
    given = inspect.signature(function).parameters.values()
    kinds = {parameter.name: HINTS[parameter.annotation.__name__] for parameter in given}
    optional = [parameter.name for parameter in given if parameter.default != parameter.empty]
    description = inspect.getdoc(function) or ""
    return Tool(function.__name__, description, schema_of(kinds, optional), function)


def own_tools(path: Path) -> list[Tool]:
    """The public functions of a user's Python file. It is imported once, in a process of its own,
    to see that it can be."""
    try:
        path = path.resolve()
        module = ast.parse(read_file(path, FILE_BYTES), path.name)
    except OSError as error:
        raise ConfigError(f"cannot read the tools of {path}: {error.strerror}") from None
    except (ToolError, SyntaxError, ValueError, RuntimeError, MemoryError) as error:
        raise ConfigError(f"cannot read the tools of {path}: {error}") from None
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    public = [n for n in module.body if isinstance(n, functions) and not n.name.startswith("_")]
    tools = {node.name: _own_tool(path, node) for node in public}
    if not tools:
        hint = "define a function with type hints, its name not beginning with _"
        raise ConfigError(f"{path} has no tools", hint=hint)
    try:
        run_own(path, "")
    except ToolError as error:
        raise ConfigError(f"{path} cannot be imported: {error}") from None
    return list(tools.values())


def _own_tool(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Tool:
    """A tool by the signature and the docstring of a function."""
    where, given = f"{path}, line {node.lineno}: the tool {node.name}", node.args
    if isinstance(node, ast.AsyncFunctionDef) or given.vararg or given.kwarg or given.posonlyargs:
        problem = f"{where} cannot be called by the names of its arguments"
        raise ConfigError(problem, hint="write a plain function without async, *, ** and /")
    kinds: dict[str, str] = {}
    for argument in [*given.args, *given.kwonlyargs]:
        hint = ast.unparse(argument.annotation).strip("'\"") if argument.annotation else ""
        if hint not in HINTS:
            problem = f"{where}: {argument.arg} has {f'the hint {hint}' if hint else 'no hint'}"
            raise ConfigError(problem, hint=f"its hint can be {', '.join(HINTS)}")
        kinds[argument.arg] = HINTS[hint]
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    optional = {argument.arg for argument, default in named if default is not None}
    optional |= {a.arg for a in given.args[len(given.args) - len(given.defaults) :]}
    description = (ast.get_docstring(node) or "").partition("\n")[0]
    run = functools.partial(run_own, path, node.name)
    return Tool(node.name, description, schema_of(kinds, optional), run)


def run_own(path: Path, name: str, /, **arguments: Any) -> str:
    """What a function of a user's file returns, as text; without a name it is only imported.

    Its process ends with the call, and so does all that it started in its group.
    """
    limits = {"RLIMIT_AS": MEMORY_BYTES, "RLIMIT_CORE": 0}
    request: dict[str, Any] = {"path": str(path), "name": name, "arguments": arguments}
    request |= {"limits": limits, "characters": RESULT_CHARACTERS + 2}
    new = tempfile.TemporaryFile
    with new() as source, new() as answer, new() as printed:
        source.write(json.dumps(request).encode())
        source.seek(0)
        streams: dict[str, Any] = {"stdin": source, "stdout": answer, "stderr": printed}
        command = [sys.executable, *PYTHON, "-c", CHILD]
        process = subprocess.Popen(command, **streams, **platform.new_group())
        try:
            problem = _wait(process.pid, time.monotonic() + TIME_LIMIT_S, printed)
        finally:
            platform.kill_group(process)
        answer.seek(0)
        reply = answer.read(4 * RESULT_CHARACTERS + 8).decode("utf-8", "replace")
    if problem:
        raise ToolError(problem)
    if reply.startswith("="):
        return reply[1:]
    raise ToolError(reply[1:] or f"it ended with exit code {process.returncode}, without a result")


def _wait(pid: int, deadline: float, printed: IO[bytes]) -> str:
    """Wait until a child has ended, or return why it may not go on."""
    ended = False
    while not ended:
        ended = platform.has_ended(pid)
        if os.fstat(printed.fileno()).st_size >= OUTPUT_BYTES:
            return "it printed too much"
        if not ended and time.monotonic() > deadline:
            return f"it took longer than {TIME_LIMIT_S:g} s"
        if not ended:
            time.sleep(LOOK_EVERY_S)
    return ""
