"""The command line, installed as `forge` and `agent-forge`.

Thin: a command parses, calls one function below, and prints. stdout carries data, stderr the rest.
A command is a plain function; options.json describes its parameters. No module here imports torch
when it is loaded, so help and listings answer at once.

| file | what is in it |
|---|---|
| run | run, resume, stop, phases, init, validate: the pipeline and its config |
| status | status, logs, export: one run |
| report | report: a run as one HTML file |
| push | push: a model to a Hugging Face hub |
| sync | sync: what a run measured, in W&B or trackio |
| runs | ls, show, models, clean, vacuum: what is stored |
| evo | evo, evo replay: evolve models into one |
| merge | merge: one merge |
| quantize | quantize: a model in few bits |
| compress | compress: a model in one small file |
| bake | bake: a prompt becomes a part of a model |
| edge | edge: a model made smaller for a device |
| evaluate | eval, compare: what models can do |
| generate | generate, chat: what a model says |
| serve | serve: runs and models for other programs |
| dashboard | dashboard: runs and models in a browser |
| data | data ls, fetch, verify, show: datasets |
| traces | data traces: worked thoughts to learn from |
| doctor | doctor: what this machine has |
| output | what commands print: JSON or a table |
| options.json | the options and arguments of every command |
"""

import contextlib
import errno
import inspect
import io
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import agent_forge
from agent_forge import platform
from agent_forge.cli import (
    bake,
    compress,
    dashboard,
    data,
    doctor,
    edge,
    evaluate,
    evo,
    generate,
    merge,
    push,
    quantize,
    report,
    run,
    runs,
    serve,
    status,
    sync,
    traces,
)
from agent_forge.cli.output import emit_json
from agent_forge.errors import Cancelled, ForgeError, Interrupted

Command = Callable[..., None]
COMMANDS: list[Command] = [run.run, run.resume, run.stop, status.status, status.logs, run.phases]
COMMANDS += [status.export, push.push, merge.merge, generate.generate, generate.chat, evaluate.eval]
COMMANDS += [evaluate.compare, run.init, run.validate, runs.ls, runs.show, runs.models]
COMMANDS += [quantize.quantize, compress.compress, bake.bake, edge.edge, runs.clean, runs.vacuum]
COMMANDS += [report.report, dashboard.dashboard, serve.serve, sync.sync, doctor.doctor]
OPTIONS: dict[str, dict[str, dict[str, Any]]]
OPTIONS = json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))
# A path that was given is none, whatever the disk is like.
NO_SUCH_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


class CommandGroup(TyperGroup):
    """All commands. Typer would end an interrupted one with 130, which is for what can go on."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Cancelled("interrupted") from None


def with_options(command: Command) -> Command:
    """The command with what options.json says of its parameters as their defaults, for typer."""
    module = command.__module__.rpartition(".")[2]
    described = OPTIONS["shared"] | OPTIONS.get(f"{module}.{command.__name__}", {})
    defaults: list[Any] = []
    for name in inspect.signature(command).parameters:
        if name != "context":
            settings = {"flags": "", "default": ..., **described[name]}
            flags, default = settings.pop("flags").split(), settings.pop("default")
            kind = typer.Option if flags else typer.Argument
            defaults.append(kind(default, *flags, **settings))
    command.__defaults__ = tuple(defaults)
    return command


app = typer.Typer(
    name="forge",
    cls=CommandGroup,
    help="Grow, merge, teach, shrink and ship small language models on your own machine.",
    epilog="--debug anywhere shows the traceback of an error.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(agent_forge.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """What can be asked without a command."""


about_data = "List, download, check, show and make datasets."
data_app = typer.Typer(name="data", help=about_data, no_args_is_help=True, rich_markup_mode=None)
about_evo = "Evolve models into one, and say whether it is better."
evo_app = typer.Typer(name="evo", help=about_evo, invoke_without_command=True)
evo_app.callback()(with_options(evo.evo))
data_commands: list[Command] = [data.ls, data.fetch, data.verify, data.show, traces.traces]
for group, commands in ((app, COMMANDS), (data_app, data_commands), (evo_app, [evo.replay])):
    for command in commands:
        group.command()(with_options(command))
app.add_typer(data_app)
app.add_typer(evo_app)


def main() -> None:
    """Run the command line; every failure ends with what is wrong and the next step."""
    debug = "--debug" in sys.argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    with platform.on_stop_signals(platform.interrupt):
        try:
            app(args=[argument for argument in sys.argv[1:] if argument != "--debug"])
        except Exception as error:
            if debug and not isinstance(error, ForgeError):
                raise
            if debug:
                traceback.print_exc()
            sys.exit(_tell(error))


def _tell(error: Exception) -> int:
    """Print what is wrong, or what was asked for, and the next step; return the exit code."""
    problem, hint, exit_code = f"error: {error}", "", 5
    if isinstance(error, ForgeError):
        problem = str(error) if isinstance(error, Interrupted) else problem
        hint, exit_code = error.hint, error.exit_code
    elif isinstance(error, OSError):
        problem = f"error: {error.strerror or error}: {error.filename or 'output'}"
        exit_code = 2 if error.errno in NO_SUCH_PLACE else 5
    elif isinstance(error, MemoryError):
        problem = "error: there is not enough memory for this"
    else:  # the last resort: a defect of ours, shown as such
        problem, exit_code = f"unexpected {type(error).__name__}: {error}", 1
        hint = "this is a defect; run it again with --debug to see where"
    print(problem, file=sys.stderr)
    if hint:
        print(f"next: {hint}", file=sys.stderr)
    if "--json" in sys.argv and isinstance(error, ForgeError):
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more
            emit_json(error=str(error), hint=hint, exit_code=exit_code)
    return exit_code
