"""The command line, installed as `forge` and `agent-forge`.

Thin: a command parses, calls one function below, and prints. stdout carries data, stderr the rest.
No module here imports torch when it is loaded, so help and listings answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import io
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from agent_forge import platform
from agent_forge.cli import config, data, doctor, evaluate, evo, generate, merge, run, runs, status
from agent_forge.cli.output import emit_json
from agent_forge.errors import Cancelled, ForgeError, Interrupted


class Commands(TyperGroup):
    """All commands. Typer would end an interrupted one with 130, which is for what can go on."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Cancelled("interrupted") from None


# A path that was given is none, whatever the disk is like.
NO_SUCH_PLACE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)

app = typer.Typer(
    name="forge",
    cls=Commands,
    help="Grow, merge, teach, shrink and ship small language models on your own machine.",
    epilog="--debug anywhere shows the traceback of an error.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


for command in (
    run.run,
    run.resume,
    run.stop,
    status.status,
    status.logs,
    run.phases,
    status.export,
    merge.merge,
    generate.generate,
    generate.chat,
    evaluate.eval,
    evaluate.compare,
    config.init,
    config.validate,
    runs.ls,
    runs.show,
    runs.models,
    runs.clean,
    runs.vacuum,
    doctor.doctor,
):
    app.command()(command)
app.add_typer(data.app)
app.add_typer(evo.app)


def main() -> None:
    """Run the command line; every failure ends with what is wrong and the next step."""
    debug = "--debug" in sys.argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    with platform.on_stop_signals(platform.interrupt):
        try:
            app(args=[argument for argument in sys.argv[1:] if argument != "--debug"])
        except ForgeError as error:
            if debug:
                traceback.print_exc()
            _tell(error)
            sys.exit(error.exit_code)
        except OSError as error:
            if debug:
                raise
            what = f"{error.strerror or error}: {error.filename or 'output'}"
            print(f"error: {what}", file=sys.stderr)
            sys.exit(2 if error.errno in NO_SUCH_PLACE else 5)
        except MemoryError:
            if debug:
                raise
            print("error: there is not enough memory for this", file=sys.stderr)
            sys.exit(5)
        except Exception as error:  # the last resort: a defect of ours, shown as such
            if debug:
                raise
            print(f"unexpected {type(error).__name__}: {error}", file=sys.stderr)
            print("next: this is a defect; run it again with --debug to see where", file=sys.stderr)
            sys.exit(1)


def _tell(error: ForgeError) -> None:
    """What is wrong, or what was asked for, and the next step."""
    print(str(error) if isinstance(error, Interrupted) else f"error: {error}", file=sys.stderr)
    if error.hint:
        print(f"next: {error.hint}", file=sys.stderr)
    if "--json" in sys.argv:
        with contextlib.suppress(BrokenPipeError):  # nobody reads any more
            emit_json(error=str(error), hint=error.hint, exit_code=error.exit_code)
