"""`forge generate` and `forge chat`: what a model says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agent_forge.cli.output import emit_json
from agent_forge.errors import ConfigError

if TYPE_CHECKING:
    from agent_forge.infer.thinking import SpokenPiece


def generate(
    model: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    as_json: bool,
) -> None:
    """Continue a text."""
    from agent_forge.infer.chat import check_prompt, open_chat_model
    from agent_forge.infer.generate import SamplingSettings
    from agent_forge.model.locate import locate_model

    sampling = SamplingSettings(tokens, temperature, top_k, top_p, seed)
    text = check_prompt(_from_stdin(sys.stdin.read) if prompt == "-" else prompt)
    pieces = open_chat_model(locate_model(model)).complete(text, sampling)
    if as_json:
        emit_json(model=str(model), prompt=text, text="".join(pieces))
    else:
        _print(pieces)


def chat(
    model: Path,
    system: str,
    think: str,
    hide_thoughts: bool,
    no_tools: bool,
    tools: Path | None,
    files: Path | None,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> None:
    """Talk to a model, line by line.

    An empty line, Ctrl-D or Ctrl-C ends the conversation. Thoughts, and tools that are called with
    what they say, go to stderr.
    """
    from agent_forge.infer.chat import check_prompt, open_chat_model, toolbox_of
    from agent_forge.infer.generate import SamplingSettings
    from agent_forge.infer.thinking import think_mode
    from agent_forge.model.locate import locate_model

    sampling = SamplingSettings(tokens, temperature, top_k, top_p, seed)
    mode = think_mode(think)
    if system:
        check_prompt(system, "--system")
    if no_tools and (tools or files):
        raise ConfigError("--no-tools goes with neither --tools nor --files")
    place = locate_model(model)
    toolbox = None if no_tools else toolbox_of(Path(place), tools, files)
    speaker = open_chat_model(place, toolbox)
    turns = [{"role": "system", "content": system}] if system else []
    try:
        while line := _line():
            turns.append({"role": "user", "content": line})
            pieces = speaker.think_and_reply(turns, sampling, mode)
            reply = _print(_answer(pieces, hide_thoughts))
            turns.append({"role": "assistant", "content": reply})
    except KeyboardInterrupt as error:
        if str(error) not in ("", "SIGINT"):  # it was not Ctrl-C
            raise
        typer.echo()


def _answer(pieces: Iterable[SpokenPiece], hide_thoughts: bool) -> Iterator[str]:
    """The pieces of the answer; thoughts, unless they are hidden, and tools are shown aside."""
    verbs = {"thought": "thinks", "call": "calls", "result": "result"}
    for piece in pieces:
        if piece.kind == "answer":
            yield piece.text
        elif piece.kind != "thought" or not hide_thoughts:
            typer.echo(f"({verbs[piece.kind]}: {_harmless(piece.text)})", err=True)


def _harmless(text: str) -> str:
    """A text of models, files and tools without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _print(pieces: Iterable[str]) -> str:
    """Print the pieces of a text as they come, to a terminal without what would steer it; returns
    the text."""
    text, is_terminal = "", sys.stdout.isatty()
    for piece in pieces:
        text += piece
        typer.echo(_harmless(piece) if is_terminal else piece, nl=False)
    typer.echo()
    return text


def _line() -> str:
    """The next line of the user; nothing at the end of the input."""
    if sys.stdin.isatty():
        typer.echo("> ", nl=False, err=True)
    return _from_stdin(sys.stdin.readline).rstrip("\n")


def _from_stdin(read: Callable[[int], str]) -> str:
    """Read the input, but no more than it takes to see that it is too long."""
    from agent_forge.data.row_files import MAX_CHARACTERS

    try:
        return read(MAX_CHARACTERS + 2)  # a line has its end besides
    except UnicodeDecodeError as error:
        raise ConfigError("what comes from stdin is not UTF-8 text") from error
