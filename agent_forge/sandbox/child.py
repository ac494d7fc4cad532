"""The program that the sandbox starts: it confines itself, then runs the code that it was sent.

It is sent to a bare interpreter and imports the standard library only. What the kernel enforces
(limits, namespaces, Landlock, seccomp) holds whatever the code does. The audit hook is softer: it
gives readable refusals, and is the fence where the kernel has none.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal would load enum, which takes longer
import _thread
import marshal
import os
import struct
import sys

TYPE_CHECKING = False  # typing itself would take longer to load than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

MEMORY_EXIT = 113  # how it says that memory ran out
FILES_WITHOUT_DISK = 256  # files it may write where it has no small disk of its own
NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000  # user, mounts, network, ipc
BIND, UNMOUNT_ALL, NO_DEVICES_NO_PROGRAMS = 0x1000 | 0x4000, 2, 2 | 4 | 8
MOUNT_SETATTR, EVERYWHERE, READ_ONLY = 442, 0x8000, struct.pack("QQQQ", 1, 0, 0, 0)
READ, READ_DIRECTORY, WRITE = 1 << 2, 1 << 3, 1 << 1
DEVICES_SOCKETS_PROGRAMS = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED_MODULES = {"ctypes", "_ctypes"}
REFUSED_PARTS = {"ctypes", "subprocess", "pty", "syslog", "webbrowser", "fcntl"}
PATH_PARTS = {"os", "shutil", "tempfile", "sqlite3"}
REFUSED_CALLS = ("fork", "forkpty", "exec", "posix_spawn", "spawn", "system", "killpg")
REFUSED_EVENTS = {f"os.{name}" for name in REFUSED_CALLS}
REFUSED_EVENTS |= {"gc.get_objects", "gc.get_referrers", "signal.pthread_kill", "resource.prlimit"}
READING_CALLS = ("listdir", "scandir", "walk", "fwalk", "chdir", "getxattr", "listxattr")
READING_EVENTS = {f"os.{name}" for name in READING_CALLS}


def set_limits(limits: dict[str, Any]) -> None:
    """Set limits of the system, which the code can only lower."""
    import resource

    for name, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_FSIZE", limits["file_mb"] << 20),
        ("RLIMIT_NPROC", limits["processes"]),
        ("RLIMIT_CPU", limits["cpu_seconds"]),
        ("RLIMIT_AS", limits["memory_mb"] << 20),
    ):
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        hard = value + 1 if name == "RLIMIT_CPU" and value != ceiling else value
        resource.setrlimit(kind, (value, hard))


def confine(request: dict[str, Any], folder: str) -> dict[str, bool]:
    """Put on every layer; returns which of them this kernel grants."""
    import ctypes

    plan, limits = request["plan"], request["limits"]
    libc = ctypes.CDLL(None)

    def call(name: str, *args: int | bytes | None) -> int:
        function = getattr(libc, name, None)
        if function is None:
            return -1
        return int(function(*[ctypes.c_ulong(a) if isinstance(a, int) else a for a in args]))

    call("prctl", 1, 9)  # killed when the caller dies
    if os.getppid() != request["caller"]:  # it is dead already
        os._exit(1)
    libraries = {*plan["readable"], *sys.path, f"{sys.base_prefix}/lib"}
    layers = new_namespaces(call, folder, {*libraries, "/dev/null"}, limits)
    os.chdir(folder)
    call("prctl", 38, 1, 0, 0, 0)  # no new privileges
    call("prctl", 4, 0, 0, 0, 0)  # not to be looked into by others of this user
    layers["landlock"] = landlock(call, folder, libraries)
    layers["no_capabilities"] = call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0
    set_limits(limits)
    code = plan["filter"].replace(struct.pack("<I", plan["self"]), struct.pack("<I", os.getpid()))
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(kept))
    layers["seccomp"] = bool(code) and call("prctl", 22, 2, program) == 0
    for name in [name for name in sys.modules if name.partition(".")[0] in REFUSED_MODULES]:
        del sys.modules[name]
    return layers


def new_namespaces(
    call: Callable[..., int], folder: str, kept: set[str], limits: dict[str, Any]
) -> dict[str, bool]:
    """Take away network and writable mounts; leave few files, and a small disk as the folder."""
    user, group = os.getuid(), os.getgid()
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    if call("unshare", NEW_NAMESPACES) != 0:
        return {}
    try:
        for name, text in maps.items():
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
            os.write(fd, text.encode())
            os.close(fd)
    except OSError:  # then nothing can be mounted either
        return {"namespaces": True}
    read_only = call("syscall", MOUNT_SETATTR, -100, b"/", EVERYWHERE, READ_ONLY, 32) == 0
    root = own_root(call, folder, kept)
    own_disk = new_disk(call, folder, f"size={limits['file_mb']}m,nr_inodes=1024,mode=700")
    return {"namespaces": True, "read_only": read_only, "own_root": root, "own_disk": own_disk}


def new_disk(call: Callable[..., int], folder: str, options: str) -> bool:
    """Put an empty disk in memory in place of the folder."""
    kind, place = b"tmpfs", os.fsencode(folder)
    return call("mount", kind, place, kind, NO_DEVICES_NO_PROGRAMS, options.encode()) == 0


def own_root(call: Callable[..., int], folder: str, kept: set[str]) -> bool:
    """Leave all files behind but the folder and what is kept; these stay where they were.

    Landlock refuses to open a file, yet lets everyone see that it exists, its size and its times.
    """
    if not new_disk(call, folder, "size=1m,nr_inodes=4096,mode=755"):
        return False
    try:
        for path in sorted(kept):
            bind_mount(call, path, folder + path)
        os.makedirs(folder + folder, exist_ok=True)  # noqa: PTH103
        call("syscall", MOUNT_SETATTR, -100, os.fsencode(folder), 0, READ_ONLY, 32)
        os.chroot(folder)
    except OSError:
        call("umount2", os.fsencode(folder), UNMOUNT_ALL)
        return False
    return True


def bind_mount(call: Callable[..., int], path: str, place: str) -> None:
    """Show a file or folder in another place too, unless a folder around it is there already."""
    if not os.path.exists(path) or os.path.exists(place):  # noqa: PTH110
        return
    if os.path.isdir(path):  # noqa: PTH112
        os.makedirs(place)  # noqa: PTH103
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120
        os.mknod(place)
    if call("mount", os.fsencode(path), os.fsencode(place), None, BIND, None):
        raise OSError(f"{path} cannot be mounted")


def landlock(call: Callable[..., int], folder: str, readable: set[str]) -> bool:
    """Nothing can be opened but the folder, the standard library and the system's libraries."""
    version = call("syscall", 444, None, 0, 1)
    if version < 1:
        return False
    rights = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1
    network, scope = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    known = 8 * (1 + (version > 3) + (version > 5))
    attributes = struct.pack("QQQ", rights, network, scope)[:known]
    rules = call("syscall", 444, attributes, len(attributes), 0)
    if rules < 0:
        return False
    allowed = dict.fromkeys(readable, READ | READ_DIRECTORY)
    allowed["/dev/null"] = READ | WRITE
    allowed[folder] = rights & ~DEVICES_SOCKETS_PROGRAMS
    for path, access in allowed.items():
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # not on this system
            continue
        if not os.path.isdir(path):  # noqa: PTH112
            access &= READ | WRITE
        call("syscall", 445, rules, 1, struct.pack("=Qi", access, fd), 0)
        os.close(fd)
    held = call("syscall", 446, rules, 0) == 0
    os.close(rules)
    return held


def audit_hook(folder: str, files: int | None) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that refuses what code has no business with; it may write so many files."""
    real, me = os.path.realpath, os.getpid()
    readable = (*map(real, sys.path), "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom")
    written = 0

    def inside(path: Any, writing: bool) -> bool:
        if not isinstance(path, str | bytes):
            return True  # a descriptor that is open already
        place = real(os.fsdecode(path))
        if place == "/dev/null" or f"{place}/".startswith(f"{folder}/"):
            return True
        library = any(f"{place}/".startswith(f"{root}/") for root in readable)
        return library and not writing and "-packages" not in place

    def allowed(event: str, args: tuple[Any, ...]) -> bool:
        nonlocal written
        part = event.partition(".")[0]
        if event == "open":
            writing = bool(args[2] & WRITING)
            written += writing
            return inside(args[0], writing) and (files is None or written <= files)
        if event == "import":
            return args[0].partition(".")[0] not in REFUSED_MODULES
        if event == "os.kill":
            return bool(args[0] == me)
        if part == "socket":  # connected pairs only, which asyncio needs
            return event == "socket.__new__" and args[1] == 1 and args[2] & 15 == 1
        if event in REFUSED_EVENTS or part in REFUSED_PARTS:
            return False
        if part in PATH_PARTS and event not in ("os.putenv", "os.unsetenv"):
            return all(inside(path, event not in READING_EVENTS) for path in args)
        return True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not allowed(event, args):
            raise PermissionError(f"the sandbox refuses {event}")

    return hook


def limit_threads(processes: int) -> None:
    """Refuse more threads: not every version of Python has an audit event for a new one."""

    def limited(start: Callable[..., Any]) -> Callable[..., Any]:
        def start_one(*args: Any, **named: Any) -> Any:
            if _thread._count() + 1 >= processes:
                raise RuntimeError("the sandbox refuses another thread")
            return start(*args, **named)

        return start_one

    for name in ("start_new_thread", "start_new", "start_joinable_thread"):
        if hasattr(_thread, name):
            setattr(_thread, name, limited(getattr(_thread, name)))


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of the code without the frames of this file."""
    sys.stdout.flush()
    if issubclass(kind, MemoryError):
        os.write(2, b"MemoryError\n")
        os._exit(MEMORY_EXIT)
    own = ("<string>", report.__code__.co_filename)
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def main() -> None:
    for number in (_signal.SIGTERM, _signal.SIGHUP):  # of a shutdown: the caller decides
        _signal.signal(number, _signal.SIG_IGN)
    size, data = int.from_bytes(os.read(0, 8), "little"), b""
    while len(data) < size:  # the request stands before the code's own input
        data += os.read(0, size - len(data))
    request = marshal.loads(data)
    limits, plan, folder = request["limits"], request["plan"], os.path.realpath(".")
    os.environ.clear()
    sys.path.pop(0)  # the working directory
    layers = confine(request, folder) if plan else {}
    if not plan:
        set_limits(limits)
    if request["hook"]:
        sys.addaudithook(audit_hook(folder, None if layers.get("own_disk") else FILES_WITHOUT_DISK))
        limit_threads(limits["processes"])
    if not request["code"]:
        os.write(1, repr(layers).encode())
        return
    module = type(sys)("__main__")
    sys.modules["__main__"], sys.argv = module, [""]
    sys.excepthook = report
    for part in request["code"]:
        code = compile(part, "<code>", "exec", dont_inherit=True) if type(part) is str else part
        exec(code, module.__dict__)  # noqa: S102


if __name__ == "__main__":
    main()
