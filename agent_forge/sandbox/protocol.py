"""Two confined processes: one holds the answer, the other runs the tests. Neither trusts the other.

This file is sent to both as the beginning of their program. Whatever the answer defines is a proxy
in the test process, which asks the other one. Only plain values come back, built anew from JSON;
all other objects stay where they are and equal nothing. So the tests, what they expect and the
grades are out of the answer's reach, and its only way to pass is to return what a right answer
returns.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_MESSAGE = 16 << 20
ANSWER = "answer"
CALLED = re.compile(r"(?<![\w.])(?!assert\b|not\b)[A-Za-z_]\w*(?=\()")  # in a test
# name -> type, how it is written, how it is read
SCALARS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "int": (int, hex, lambda text: int(text, 16)),
    "float": (float, float.hex, float.fromhex),
    "complex": (complex, complex.__repr__, complex),
    "bytes": (bytes | bytearray, lambda value: value.hex(), bytes.fromhex),
}
CONTAINERS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, named: target(*args, **named),
    "get": getattr,
    "set": setattr,
    "item": lambda target, key: target[key],
}
OPERATIONS |= {of.__name__: of for of in (iter, next, len, str, repr, bool)}


class ConnectionClosed(BaseException):
    """The other process is gone, or does not keep to the protocol: nothing can pass any more."""


class Connection:
    """One end of the pipes. `serves` are the operations that the other end may ask for."""

    def __init__(
        self, reading: int, writing: int, serves: set[str], proxy: type[RemoteObject]
    ) -> None:
        self.reader, self.writing, self.serves = os.fdopen(reading, "rb"), writing, serves
        self.proxy = proxy  # for objects of the other end
        self.mine: list[Any] = []  # objects that the other end has a proxy for
        self.names: dict[str, Any] = {}

    def send(self, *message: Any) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self.writing, data) :]
        except OSError:
            raise ConnectionClosed from None

    def receive(self) -> list[Any]:
        line = self.reader.readline(MAX_MESSAGE)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ConnectionClosed from None
        if not line.endswith(b"\n") or not isinstance(message, list) or not message:
            raise ConnectionClosed
        return message

    def ask(self, operation: str, target: RemoteObject | str, *args: Any) -> Any:
        """The result of an operation at the other end; serves what that asks for meanwhile."""
        self.send("ask", operation, *map(self.encode, (target, *args)))
        while True:
            match self.receive():
                case ["ask", str(wanted), *values]:
                    self.serve(wanted, values)
                case ["value", value, *after]:
                    if operation == "call" and args:
                        copy_back(args[0], [self.decode(item) for item in after])
                    return self.decode(value)
                case ["raised", str(name), str(text)]:
                    kind = getattr(builtins, name, None)
                    # Of a call these would end a loop of the test.
                    ends = () if operation == "next" else (StopIteration, StopAsyncIteration)
                    fits = isinstance(kind, type) and issubclass(kind, Exception)
                    fits = fits and not issubclass(kind, ends)  # type: ignore[arg-type]
                    raise (kind if fits else RuntimeError)(text)  # type: ignore[misc]
                case _:
                    raise ConnectionClosed

    def serve(self, operation: str, values: list[Any]) -> None:
        try:
            if operation not in self.serves:
                raise PermissionError(operation)
            args = [self.decode(value) for value in values]
            result = self.names[args[0]] if operation == "name" else OPERATIONS[operation](*args)
            after = args[1] if operation == "call" else []
            reply = ("value", self.encode(result), *map(self.encode, after))
        except ConnectionClosed:
            raise
        except BaseException as error:  # noqa: BLE001 - what an answer raises belongs to the answer
            reply = ("raised", type(error).__name__, str(error))
        self.send(*reply)

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, RemoteObject):
            return {"yours": object.__getattribute__(value, "_index")}
        for name, (kind, write, _) in SCALARS.items():
            if isinstance(value, kind):
                return {name: write(value)}
        if isinstance(value, dict):
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        for name, kind in CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [self.encode(item) for item in value]}
        self.mine.append(value)
        return {"mine": len(self.mine) - 1}

    def decode(self, data: Any) -> Any:
        if data is None or isinstance(data, bool | str):
            return data
        ((kind, value),) = data.items()
        if kind in SCALARS:
            return SCALARS[kind][2](value)
        if kind in CONTAINERS:
            return CONTAINERS[kind](self.decode(item) for item in value)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in value}
        return self.mine[value] if kind == "yours" else self.proxy(self, value)


def forward(operation: str) -> Any:
    """A method that asks the other process to do this operation."""
    return lambda proxy, *args: proxy._ask(operation, *args)


class RemoteObject:
    """Stands for an object of the other process. It has no order or arithmetic of its own."""

    _ask: Any

    def __init__(self, connection: Connection, index: int) -> None:
        object.__setattr__(self, "_ask", lambda what, *args: connection.ask(what, self, *args))
        object.__setattr__(self, "_index", index)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._ask("call", list(args), named)

    def __iter__(self) -> Any:
        items = self._ask("iter")
        if isinstance(items, RemoteObject):
            return items
        raise TypeError("not an iterator")

    __getattr__, __setattr__, __getitem__ = map(forward, ("get", "set", "item"))
    __next__, __len__, __bool__ = map(forward, ("next", "len", "bool"))
    __str__, __repr__ = map(forward, ("str", "repr"))


class UntrustedObject(RemoteObject):
    """Stands for an object of the answer. It could claim to equal another, so none are compared."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteObject):
            raise TypeError("objects of the answer cannot be compared: compare plain values")
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


def copy_back(before: list[Any], after: list[Any]) -> None:
    """Do to the arguments (lists, dicts, sets) what the call did to their copies."""
    for old, new in zip(before, after, strict=False):
        if type(old) is type(new) and isinstance(old, list):
            old[:] = new
        elif type(old) is type(new) and isinstance(old, dict | set):
            old.clear()
            old.update(new)


def with_static_methods(found: Any, kind: Any) -> Any:
    """What was found for a class of the setup, with that class's own static methods."""
    for above in reversed(getattr(kind, "__mro__", ())):
        for name, value in vars(above).items():
            if isinstance(value, staticmethod) and isinstance(found, RemoteObject):
                object.__setattr__(found, name, value.__func__)
    return found


def run_source(source: str, name: str, names: dict[str, Any]) -> None:
    exec(compile(source, f"<{name}>", "exec", dont_inherit=True), names)  # noqa: S102


def serve_answer(reading: int, writing: int, code: str, setup: str) -> None:
    """Run the answer, then do what the tests ask with what it defined."""
    connection = Connection(reading, writing, {"name", *OPERATIONS}, RemoteObject)
    module = type(sys)(ANSWER)  # not __main__: what a program does when it is run is not asked for
    sys.modules |= {"__main__": module, ANSWER: module}
    names = module.__dict__
    run_source(setup, ANSWER, names)
    given = dict(names)
    run_source(code, ANSWER, names)
    connection.names = {**names, **given}
    connection.send("ready", *[name for name in names if isinstance(name, str)])
    with contextlib.suppress(ConnectionClosed):  # the tests are over
        while True:
            _, wanted, *values = connection.receive()
            connection.serve(wanted, values)


def test_answer(reading: int, writing: int, setup: str, tests: list[str]) -> None:
    """Run each test and write 1 or 0 for it.

    Names of the setup, builtins (unless the tests call nothing else) and modules of the standard
    library are this process's own. Classes of the setup live with the answer, so that instances can
    be handed to it, but for their static methods.
    """
    connection, grades = Connection(reading, writing, {"call"}, UntrustedObject), os.dup(1)
    sys.stdout = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__"}
    run_source(setup, "setup", names)
    own = {n for n, v in names.items() if not (isinstance(v, type) and v.__module__ == "__main__")}
    called, known = {*CALLED.findall("\n".join(tests))}, {*dir(builtins)}
    asked = called if called <= known else set()
    names |= dict.fromkeys(asked)  # the answer is to define them
    _, *defined = connection.receive()
    for name in defined:
        used = isinstance(name, str) and any(name in source for source in (setup, *tests))
        if not used or name in own | known - asked or name.startswith("__"):
            continue
        if name in sys.stdlib_module_names and any(f"{name}." in test for test in tests):
            names[name] = importlib.import_module(name)
            continue
        names[name] = with_static_methods(connection.ask("name", name), names.get(name))
    for test in tests:
        try:
            run_source(test, "test", names)
        except Exception:  # noqa: BLE001 - a test that raises has not passed
            os.write(grades, b"0")
        else:
            os.write(grades, b"1")
