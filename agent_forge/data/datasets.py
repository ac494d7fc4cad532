"""The datasets by name: their origin (datasets.json), local files, splits and download.

A published test set is for the verdict; without one, a hash of what is asked decides on the split,
so that a near-copy of an example is always on the same side.
"""

import fnmatch
import hashlib
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_forge.config.load import did_you_mean
from agent_forge.data import dataset_rows
from agent_forge.data.dataset_rows import Example, Reader
from agent_forge.data.near_copies import BY_PROMPT, SplitBy, question_hash
from agent_forge.data.row_files import SUFFIXES, DataRow, rows
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, ForgeError, NotFound
from agent_forge.store import files

log = logging.getLogger(__name__)
WRONG = "marked as wrong, or not to be learned"
SPLITS = ("train", "selection", "verdict")
SAVED, RECORD = "examples.jsonl", "source.json"
NAMED_BY_SPLIT = "*train*|*valid*|*val*|*dev*|*test*"
KINDS = {"train": "train", "test": "test"}
KINDS |= dict.fromkeys(("valid", "validation", "val", "dev"), "valid")


@dataclass(frozen=True)
class Dataset:
    """A dataset of datasets.json. Of `patterns`, the first that names any file is used."""

    name: str
    hub: str
    config: str
    category: str  # math | code | qa | cs (common sense) | lang
    stage: int  # of the curriculum, 1 to 3
    licence: str
    reader: Reader
    patterns: Sequence[str] = (NAMED_BY_SPLIT,)
    folders: Sequence[str] = ()
    kind_of: Callable[[DataRow], str] | None = None


DATASETS: dict[str, Dataset] = {}
_table = json.loads(Path(__file__).with_name("datasets.json").read_text(encoding="utf-8"))
for _name, _row in _table.items():
    for _key in {"reader", "kind_of"} & _row.keys():
        _row[_key] = getattr(dataset_rows, _row[_key])
    DATASETS[_name] = Dataset(_name, **_row)


def find(name: str) -> Dataset:
    if name not in DATASETS:
        raise ConfigError(f"unknown dataset {name!r}{did_you_mean(name, list(DATASETS))}")
    return DATASETS[name]


def local_files(dataset: Dataset, folder: Path) -> list[Path]:
    """The files of a dataset below a data folder; none where it is not there."""
    for name in (dataset.name, *dataset.folders):
        place = folder / name
        if (place / SAVED).is_file():
            return [place / SAVED]
        there = _readable(place)
        for patterns in dataset.patterns:
            wanted = [re.compile(fnmatch.translate(w), re.IGNORECASE) for w in patterns.split("|")]
            if named := [p for p in there if any(w.match(p.name) for w in wanted)]:
                return named
    return []


def _readable(folder: Path) -> list[Path]:
    """The files of a folder that can be read, by their suffix."""
    return sorted(p for p in folder.glob("*") if p.is_file() and p.name.endswith(SUFFIXES))


def missing(names: Iterable[str], folder: Path) -> list[str]:
    """The names of the wanted datasets that the data folder lacks."""
    return [name for name in names if not local_files(find(name), folder)]


def read(
    name: str, folder: Path, *, split: str | None = None, split_by: SplitBy = "asked"
) -> Iterator[Example]:
    """The examples of a dataset in a data folder, all or those of one split."""
    return _examples(*located(name, folder), split, split_by)


def located(name: str, folder: Path) -> tuple[Dataset, list[Path]]:
    """A dataset with its files below a data folder, as its rows are to be read."""
    dataset = find(name)
    paths = local_files(dataset, folder)
    if not paths:
        expected = f"files like {dataset.patterns[0].replace('|', ', ')} are expected"
        problem = f"{folder} has no dataset {name!r}: {expected} in {folder / name}"
        raise NotFound(problem, hint=f"forge data fetch {name}, or put the files there")
    if paths[0].name == SAVED:
        dataset = replace(dataset, reader=dataset_rows.saved, kind_of=dataset_rows.saved_kind)
    return dataset, paths


def read_own(
    path: Path, *, split: str | None = None, split_by: SplitBy = "asked"
) -> Iterator[Example]:
    """The examples of a user's own file, or of all such files in a folder."""
    if not path.exists():
        raise NotFound(f"{path} does not exist")
    paths = _readable(path) if path.is_dir() else [path]
    if not paths:
        raise NotFound(f"{path} has no files that end in {', '.join(SUFFIXES)}")
    dataset = Dataset(path.stem, "", "", "own", 1, "your own", dataset_rows.own)
    return _examples(dataset, paths, split, split_by)


def _examples(
    dataset: Dataset, paths: list[Path], split: str | None, split_by: SplitBy
) -> Iterator[Example]:
    if split not in (None, *SPLITS):
        raise ConfigError(f"unknown split {split!r}{did_you_mean(str(split), SPLITS)}")
    everything = _all_examples(dataset, paths, split_by)
    return (example for example in everything if split in (None, example.split))


def _all_examples(dataset: Dataset, paths: list[Path], split_by: SplitBy) -> Iterator[Example]:
    kind_of, kinds = dataset.kind_of, kinds_in(dataset, paths)
    for path in paths:
        example, wrong = None, 0
        for row in _labelled(path):
            if dataset.reader is dataset_rows.own and dataset_rows.is_wrong(row):
                wrong += 1
                continue
            kind = kind_of(row) if kind_of else kind_of_file(path)
            for example in _read_row(dataset, row):
                side = split_of(example, kind, kinds, split_by)
                yield replace(example, source=dataset.name, split=side)
        if example is None:
            marked = f"all its answers are {WRONG}" if wrong else ""
            raise DamagedFile(path, marked or "it has rows, but no example to learn from")
        if wrong:
            log.warning("%s: %d rows are left out, whose answers are %s", path, wrong, WRONG)


def kinds_in(dataset: Dataset, paths: list[Path]) -> set[str]:
    """The published parts that there are, by the rows or by the names of files."""
    if kind_of := dataset.kind_of:
        return {kind_of(row) for path in paths for row in rows(path)}
    return {kind_of_file(path) for path in paths}


def _read_row(dataset: Dataset, row: DataRow) -> list[Example]:
    """The examples of a row; one of another shape than the reader knows is damaged."""
    try:
        examples = list(dataset.reader(row))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"not a row of {dataset.name} ({type(error).__name__}: {error})"
        raise row.damaged(problem) from error
    if any(e.choices and e.completion not in e.choices for e in examples):
        raise row.damaged("the completion is none of the choices")
    return examples


def kind_of_file(path: Path) -> str:
    """train, valid or test by the words of a file's name, else all."""
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((KINDS[word] for word in words if word in KINDS), "all")


def split_of(example: Example, kind: str, kinds: set[str], split_by: SplitBy = "asked") -> str:
    """The split of an example, from the kind of its file and the kinds that there are."""
    verdict = next((k for k in ("test", "valid") if k in kinds and len(kinds) > 1), None)
    if kind == verdict:
        return "verdict"
    if verdict == "test" and {"train", "valid"} <= kinds:
        return "selection" if kind == "valid" else "train"
    # What is beside a published test part is cut as it always was: worked examples stay the same.
    by_question = split_by not in BY_PROMPT and verdict is None
    own = question_hash(example, split_by=split_by) if by_question else _digest(example)
    number = int.from_bytes(own[:4], "big") % 100
    apart = "selection" if number < 5 else "verdict" if verdict is None else "train"
    return apart if number < 10 else "train"


def _digest(example: Example) -> bytes:
    return hashlib.sha256(f"{example.prompt}\0{example.completion}".encode()).digest()


def _labelled(path: Path) -> Iterator[DataRow]:
    """The rows of a file; labels in a file beside it (as PIQA has them) become a field."""
    beside = path.with_name(f"{path.name.split('.')[0]}-labels.lst")
    if not beside.is_file():
        yield from rows(path)
        return
    labels = beside.read_text(encoding="utf-8", errors="replace").split()
    for i, row in enumerate(rows(path)):
        if i >= len(labels):
            raise DamagedFile(beside, f"{len(labels)} labels, {path.name} has more rows")
        if not isinstance(row.value, Mapping):
            raise row.damaged("not an object with fields, which a label could be added to")
        yield replace(row, value={**row.value, "label": labels[i]})
    if i + 1 != len(labels):
        raise DamagedFile(beside, f"{len(labels)} labels for {i + 1} rows of {path.name}")


def tokenise(
    tokenizer: Tokenizer, examples: Iterable[Example]
) -> tuple[list[list[int]], list[list[bool]]]:
    """Token ids and a mask of what is learned: the completion, or all of a plain text."""
    documents: list[list[int]] = []
    masks: list[list[bool]] = []
    remaining = iter(examples)
    while chunk := list(itertools.islice(remaining, 4096)):
        prompts = tokenizer.encode_batch([example.prompt for example in chunk])
        completions = tokenizer.encode_batch([example.completion for example in chunk])
        for example, prompt, completion in zip(chunk, prompts, completions, strict=True):
            ids, learned = prompt + completion, [False] * len(prompt) + [True] * len(completion)
            if example.messages:
                ids, learned = tokenizer.chat(example.messages)
            documents.append(ids)
            masks.append(learned)
    return documents, masks


def fetch(name: str, folder: Path, *, limit: int = 20_000) -> dict[str, Any]:
    """Download at most `limit` rows (0: all) of each split, and keep them as examples of ours."""
    dataset = find(name)
    try:
        import datasets
    except ImportError:
        hint = "pip install 'agent-forge[data]'"
        raise ConfigError("fetching needs the library datasets", hint=hint) from None
    place = folder / name
    if place.exists() and not (place / RECORD).exists():
        problem = f"{place} has files that were not fetched"
        raise AlreadyExists(problem, hint="move them, or use another folder")
    if Path(dataset.hub).exists():
        problem = f"{dataset.hub} is a folder here, which would be taken for the hub's"
        raise ConfigError(problem, hint="fetch from another folder")
    try:
        parts = datasets.load_dataset(dataset.hub, dataset.config or None, streaming=True)
        return _keep(dataset, parts, place, limit)
    except ForgeError:
        raise
    except Exception as error:  # whatever the network stack of the library raises
        hint = f"go online, or put the files into {place} by hand"
        raise ConfigError(f"cannot fetch {name} from {dataset.hub}: {error}", hint=hint) from error


def _keep(
    dataset: Dataset, parts: Mapping[str, Iterable[Any]], place: Path, limit: int
) -> dict[str, Any]:
    """Write the examples of all published splits, and where they are from."""
    seen: Counter[str] = Counter()
    record = {key: getattr(dataset, key) for key in ("name", "hub", "config", "licence")}
    with files.staging(place) as stage:
        with stage.writing(SAVED) as writer:
            for kind, part in parts.items():
                for number, value in enumerate(itertools.islice(part, limit or None), start=1):
                    row = DataRow(value, Path(dataset.hub), f"{dataset.hub} {kind}, row {number}")
                    for example in _read_row(dataset, row):
                        line: dict[str, Any] = {"prompt": example.prompt}
                        line |= {"completion": example.completion, "choices": example.choices}
                        line["split"] = KINDS.get(kind, "train")
                        line |= {"tests": example.tests} if example.tests else {}
                        writer.write(json.dumps(line).encode() + b"\n")
                        seen[kind] += 1
        if not seen:
            raise DamagedFile(dataset.hub, "it has no examples")
        record |= {"examples": dict(seen), "limit": limit}
        stage.write_json(RECORD, record)
    return record


def verify(name: str, folder: Path) -> dict[str, Any]:
    """Read every line of a dataset; returns counts of examples, splits and copies, and sha256."""
    paths = local_files(find(name), folder)
    if paths and (paths[0].parent / RECORD).exists():
        files.verify(paths[0].parent)
    counts = dict.fromkeys(SPLITS, 0)
    seen: dict[bytes, str] = {}
    leaked = 0
    for example in read(name, folder):
        counts[example.split] += 1
        leaked += seen.setdefault(_digest(example), example.split) != example.split
    total = sum(counts.values())
    return {
        "name": name,
        "examples": total,
        "splits": counts,
        "duplicates": total - len(seen),
        "in_two_splits": leaked,
        "bytes": sum(path.stat().st_size for path in paths),
        "files": {str(path): files.sha256_of(path) for path in paths},
    }
