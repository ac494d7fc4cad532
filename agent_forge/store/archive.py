"""A run or a model as one archive: verified files, and a manifest of their sha256 sums."""

import contextlib
import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any, cast

from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotFound
from agent_forge.store import files, lock
from agent_forge.store.sessions import SessionStore

SUFFIXES = (".tar", ".tar.gz", ".tgz")


def export_archive(
    sessions: SessionStore, name: str, target: Path, *, overwrite: bool, dry_run: bool
) -> files.FileRecords:
    """Pack a session or a model by its id; return the manifest's records."""
    if not target.name.endswith(SUFFIXES):
        raise ConfigError(f"{target}: an archive ends in {', '.join(SUFFIXES)}")
    if (target.exists() or target.is_symlink()) and not overwrite:
        raise AlreadyExists(f"{target} exists", hint="--force overwrites it")
    source = _find(sessions, name)
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{target} is inside what it would hold")
    session = sessions.path(source.relative_to(sessions.root / "sessions").parts[0])
    records: files.FileRecords = {}
    with lock.held(session):  # nothing changes meanwhile
        paths = sorted(p for p in source.rglob("*") if p.is_file() and _belongs(p, source))
        for manifest in (p for p in paths if p.name == files.MANIFEST):
            files.verify(manifest.parent)
        for path in paths:
            record = {"sha256": files.sha256_of(path), "bytes": path.stat().st_size}
            records[f"{source.name}/{path.relative_to(source).as_posix()}"] = record
        if not dry_run:
            files.require_space(target, sum(record["bytes"] for record in records.values()))
            _write(target, overwrite, paths, records)
    return records


def _find(sessions: SessionStore, name: str) -> Path:
    with contextlib.suppress(NotFound):
        path, root = Path(sessions.registry.get_model(name)["model_path"]), sessions.root
        inside = Path(os.path.relpath(path.resolve(), (root / "sessions").resolve()))
        if not path.is_dir() or inside.parts[0] == "..":
            raise DamagedFile(path, "missing, or outside of the sessions of this storage")
        return root / "sessions" / inside
    try:
        return sessions.find(name)
    except NotFound:
        raise NotFound(f"no session or model {name!r}", hint="forge ls, forge models") from None


def _belongs(path: Path, source: Path) -> bool:
    """True unless it is a lock, a link or unfinished."""
    unfinished = any(part.startswith(files.MARKS) for part in path.relative_to(source).parts)
    return not (unfinished or path.is_symlink() or path.name == lock.LOCK_FILE)


def _write(target: Path, overwrite: bool, paths: list[Path], records: files.FileRecords) -> None:
    manifest = files.to_json({"schema_version": files.SCHEMA_VERSION, "files": records})
    with files.writing(target, replace=overwrite) as writer:
        stream = cast(Any, writer)  # its `write` is all that tarfile and gzip need
        packed = None if target.name.endswith(".tar") else gzip.GzipFile("", "wb", 6, stream, 0)
        with tarfile.open(mode="w|", fileobj=packed or stream, format=tarfile.PAX_FORMAT) as tar:
            for path, name in zip(paths, records, strict=True):
                with path.open("rb") as reader:
                    tar.addfile(_entry(name, path.stat().st_size), reader)
            tar.addfile(_entry(files.MANIFEST, len(manifest)), io.BytesIO(manifest))
        if packed is not None:
            packed.close()


def _entry(name: str, size: int) -> tarfile.TarInfo:
    """Return an entry without owner and time: the same content gives the same archive."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry
