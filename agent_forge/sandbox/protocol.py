"""Two confined processes: one holds the answer, the other judges it. Neither trusts its wire.

This file is sent to both as the beginning of their program. The judge runs the tests; whatever
the answer defines is a `Remote` there, which asks the other process. Only plain values come back,
built anew from JSON; all other objects stay where they are and equal nothing. So the tests, what
they expect and the verdict are out of the answer's reach, and its only way to pass is to return
what a right answer returns.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_MESSAGE = 16 << 20
PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": bytes.fromhex,
}
CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, named: target(*args, **named),
    **{"get": getattr, "set": setattr, "iter": iter, "next": next, "len": len, "str": str},
    **{"repr": repr, "bool": bool, "item": lambda target, key: target[key]},
}


class Closed(BaseException):
    """The other process is gone, or does not keep to the protocol: nothing can pass any more."""


class Peer:
    """One end of the wire. `serves` are the operations that the other end may ask for."""

    def __init__(
        self, reading: int, writing: int, serves: set[str], kind: type[Remote] | None = None
    ) -> None:
        self.reader, self.writing, self.serves = os.fdopen(reading, "rb"), writing, serves
        self.kind = kind or Remote  # of the other end's objects
        self.mine: list[Any] = []
        self.names: dict[str, Any] = {}

    def send(self, *message: Any) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self.writing, data) :]
        except OSError:
            raise Closed from None

    def receive(self) -> list[Any]:
        line = self.reader.readline(MAX_MESSAGE)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise Closed from None
        if not line.endswith(b"\n") or not isinstance(message, list) or not message:
            raise Closed
        return message

    def ask(self, operation: str, target: Remote | str, *args: Any) -> Any:
        """Have an operation done at the other end; serve what it asks for meanwhile."""
        self.send("ask", operation, *map(self.encode, (target, *args)))
        while True:
            match self.receive():
                case ["ask", str(wanted), *values]:
                    self.serve(wanted, values)
                case ["value", value, *after]:
                    if operation == "call" and args:
                        give_back(args[0], [self.decode(item) for item in after])
                    return self.decode(value)
                case ["raised", str(name), str(text)]:
                    kind = getattr(builtins, name, None)
                    fits = isinstance(kind, type) and issubclass(kind, Exception)
                    raise (kind if fits else RuntimeError)(text)  # type: ignore[misc]
                case _:
                    raise Closed

    def serve(self, operation: str, values: list[Any]) -> None:
        try:
            if operation not in self.serves:
                raise PermissionError(operation)
            args = [self.decode(value) for value in values]
            result = self.names[args[0]] if operation == "name" else OPERATIONS[operation](*args)
            after = args[1] if operation == "call" else []
            reply = ("value", self.encode(result), *map(self.encode, after))
        except Exception as error:  # noqa: BLE001 - what an answer raises belongs to the answer
            reply = ("raised", type(error).__name__, str(error))
        self.send(*reply)

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, Remote):
            return {"yours": index_of(value)}
        if isinstance(value, int):
            return {"int": hex(value)}
        if isinstance(value, float):
            return {"float": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, bytes | bytearray):
            return {"bytes": value.hex()}
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
        if kind in PLAIN:
            return PLAIN[kind](value)
        if kind in CONTAINERS:
            return CONTAINERS[kind](self.decode(item) for item in value)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in value}
        if kind == "yours":
            return self.mine[value]
        return self.kind(self, value)


class Remote:
    """An object of the other process. It has no equality, order or arithmetic of its own."""

    def __init__(self, peer: Peer, index: int) -> None:
        object.__setattr__(self, "_ask", lambda what, *args: peer.ask(what, self, *args))
        object.__setattr__(self, "_index", index)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._ask("call", list(args), named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __iter__(self) -> Any:
        items = self._ask("iter")
        return items if isinstance(items, Remote) else iter(())

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> Any:
        return self._ask("len")

    def __bool__(self) -> Any:
        return self._ask("bool")

    def __str__(self) -> Any:
        return self._ask("str")

    def __repr__(self) -> Any:
        return self._ask("repr")


class Unproven(Remote):
    """An object of the answer, which could say of any two of its objects that they are equal.

    To compare two of them, or to put one in a set, is therefore an error.
    """

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            raise TypeError("objects of the answer cannot be compared: compare plain values")
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


def index_of(remote: Remote) -> Any:
    return object.__getattribute__(remote, "_index")


def give_back(before: list[Any], after: list[Any]) -> None:
    """Arguments travel as copies: what the call did to lists, dicts and sets is done to them."""
    for old, new in zip(before, after, strict=False):
        if type(old) is type(new) and isinstance(old, list):
            old[:] = new
        elif type(old) is type(new) and isinstance(old, dict | set):
            old.clear()
            old.update(new)


def answer(reading: int, writing: int, code: str, setup: str) -> None:
    """Run the answer, then do what the judge asks with what it defined."""
    peer = Peer(reading, writing, {"name", *OPERATIONS})
    module = sys.modules["__main__"] = type(sys)("__main__")
    peer.names = module.__dict__
    for source in (setup, code):
        exec(compile(source, "<answer>", "exec", dont_inherit=True), peer.names)  # noqa: S102
    peer.send("ready", *[name for name in peer.names if isinstance(name, str)])
    with contextlib.suppress(Closed):  # the judge is done
        while True:
            _, wanted, *values = peer.receive()
            peer.serve(wanted, values)


def judge(reading: int, writing: int, setup: str, tests: list[str]) -> None:
    """Run each test and write 1 or 0 for it.

    Names of the setup, builtins and modules of the standard library are the judge's own. Classes
    of the setup live with the answer, so that instances can be handed to it.
    """
    peer, verdicts = Peer(reading, writing, {"call"}, Unproven), os.dup(1)
    sys.stdout = io.StringIO()
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(setup, "<setup>", "exec", dont_inherit=True), names)  # noqa: S102
    own = {n for n, v in names.items() if not (isinstance(v, type) and v.__module__ == "__main__")}
    _, *theirs = peer.receive()
    for name in theirs:
        wanted = isinstance(name, str) and any(name in test for test in tests)
        if not wanted or name in own or hasattr(builtins, name):
            continue
        module = name in sys.stdlib_module_names and any(f"{name}." in test for test in tests)
        names[name] = importlib.import_module(name) if module else peer.ask("name", name)
    for test in tests:
        try:
            exec(compile(test, "<test>", "exec", dont_inherit=True), names)  # noqa: S102
        except Exception:  # noqa: BLE001 - a test that raises has not passed
            os.write(verdicts, b"0")
        else:
            os.write(verdicts, b"1")
