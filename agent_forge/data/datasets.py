"""The datasets by name: where they come from, what a local folder holds, how they are split.

Examples are for training, for selection (what a search may look at) or for the verdict (what only
the last comparison reads). A published test set is the verdict; without one, a hash of each example
decides, so that a copy of an example is always on the same side.
"""

from __future__ import annotations

import fnmatch
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent_forge.config.load import did_you_mean
from agent_forge.data import readers
from agent_forge.data.readers import Example, Reader
from agent_forge.data.records import SUFFIXES, Row, rows
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, ForgeError, NotFound
from agent_forge.store import files

SPLITS = ("train", "selection", "verdict")
SAVED, RECORD = "examples.jsonl", "source.json"
NAMED_BY_SPLIT = "*train*|*valid*|*val*|*dev*|*test*"
KINDS = {"train": "train", "test": "test", "valid": "valid", "validation": "valid"}
KINDS |= {"val": "valid", "dev": "valid"}
ALL = "all"


@dataclass(frozen=True)
class Dataset:
    """One row of the table. Of `patterns`, the first that names any file is used."""

    name: str
    hub: str
    config: str
    category: str  # math | code | qa | cs (common sense) | lang
    stage: int  # of the curriculum, 1 to 3
    licence: str
    reader: Reader
    patterns: tuple[str, ...] = (NAMED_BY_SPLIT,)
    folders: tuple[str, ...] = ()
    kind_of: Callable[[Row], str] | None = None


_R = readers
_TEXT = (NAMED_BY_SPLIT, "*")
_TABLE = (
    Dataset("gsm8k", "openai/gsm8k", "main", "math", 1, "MIT", _R.gsm8k),
    Dataset(
        *("svamp", "ChilleD/SVAMP", "", "math", 1, "MIT", _R.svamp),
        patterns=("SVAMP*", NAMED_BY_SPLIT),
    ),
    Dataset(
        *("asdiv", "MU-NLPC/Calc-asdiv_a", "", "math", 1, "CC BY-NC 4.0", _R.asdiv),
        patterns=(NAMED_BY_SPLIT, "*asdiv*"),
    ),
    Dataset(
        *("mbpp", "google-research-datasets/mbpp", "full", "code", 1, "CC BY 4.0", _R.mbpp),
        patterns=("mbpp.json*", "sanitized-mbpp.json*", NAMED_BY_SPLIT),
        kind_of=_R.mbpp_kind,
    ),
    Dataset(
        *("codexglue", "google/code_x_glue_ct_code_to_text", "python", "code", 2),
        *("C-UDA 1.0", _R.codexglue),
    ),
    Dataset("arc_easy", "allenai/ai2_arc", "ARC-Easy", "qa", 2, "CC BY-SA 4.0", _R.arc),
    Dataset("arc_challenge", "allenai/ai2_arc", "ARC-Challenge", "qa", 2, "CC BY-SA 4.0", _R.arc),
    Dataset(
        *("hotpotqa", "hotpotqa/hotpot_qa", "distractor", "qa", 3, "CC BY-SA 4.0", _R.hotpotqa),
        patterns=("*train*|*dev*|*valid*",),
    ),
    Dataset(
        *("drop", "ucinlp/drop", "", "qa", 3, "CC BY-SA 4.0", _R.drop),
        patterns=("*train*|*dev*|*valid*",),
    ),
    Dataset("strategyqa", "ChilleD/StrategyQA", "", "qa", 3, "MIT", _R.strategyqa),
    Dataset(
        *("piqa", "baber/piqa", "", "cs", 2, "AFL 3.0", _R.piqa),
        patterns=("train*|valid*|dev*",),
    ),
    Dataset(
        *("hellaswag", "Rowan/hellaswag", "", "cs", 3, "MIT", _R.hellaswag),
        patterns=("*train*|*val*|*dev*",),
    ),
    Dataset(
        *("boolq", "google/boolq", "", "qa", 2, "CC BY-SA 3.0", _R.boolq),
        patterns=("train.*|train-*|*valid*|dev.*",),
    ),
    Dataset(
        *("wikitext", "Salesforce/wikitext", "wikitext-2-raw-v1", "lang", 2, "CC BY-SA 3.0"),
        *(_R.text, _TEXT, ("wikitext2", "wikitext-2", "wikitext-2-raw")),
    ),
    Dataset(
        *("fineweb_edu", "HuggingFaceFW/fineweb-edu", "sample-10BT", "lang", 3, "ODC-By 1.0"),
        *(_R.text, _TEXT, ("fineweb-edu",)),
    ),
    Dataset(
        "openwebtext", "Skylion007/openwebtext", "", "lang", 3, "CC0 (list only)", _R.text, _TEXT
    ),
    Dataset(
        *("tinystories", "roneneldan/TinyStories", "", "lang", 1, "CDLA-Sharing 1.0", _R.text),
        patterns=("*train*|*valid*", "*.json*", "*"),
        folders=("TinyStories",),
    ),
)
DATASETS: dict[str, Dataset] = {dataset.name: dataset for dataset in _TABLE}


def find(name: str) -> Dataset:
    """A dataset by its name."""
    if name not in DATASETS:
        raise ConfigError(f"unknown dataset {name!r}{did_you_mean(name, list(DATASETS))}")
    return DATASETS[name]


def local_files(dataset: Dataset, folder: Path) -> list[Path]:
    """The files of a dataset below a data folder; none where it is not there."""
    for name in (dataset.name, *dataset.folders):
        place = folder / name
        if (place / SAVED).is_file():
            return [place / SAVED]
        there = sorted(p for p in place.glob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        for patterns in dataset.patterns:
            named = [
                path
                for path in there
                if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns.split("|"))
            ]
            if named:
                return named
    return []


def missing(names: Iterable[str], folder: Path) -> list[str]:
    """Which of the wanted datasets are not in the data folder."""
    return [name for name in names if not local_files(find(name), folder)]


def read(name: str, folder: Path, *, split: str | None = None) -> Iterator[Example]:
    """The examples of a dataset in a data folder, all or those of one split."""
    dataset = find(name)
    paths = local_files(dataset, folder)
    if not paths:
        raise NotFound(
            f"{folder} has no dataset {name!r}: files like"
            f" {dataset.patterns[0].replace('|', ', ')} are expected in {folder / name}",
            hint=f"forge data fetch {name}, or put the files there",
        )
    if paths[0].name == SAVED:
        dataset = replace(dataset, reader=readers.saved, kind_of=readers.saved_kind)
    return _examples(dataset, paths, split)


def read_own(path: Path, *, split: str | None = None) -> Iterator[Example]:
    """The examples of a user's own file, or of all such files in a folder."""
    if not path.exists():
        raise NotFound(f"{path} does not exist")
    paths = [path]
    if path.is_dir():
        paths = sorted(p for p in path.glob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        if not paths:
            raise NotFound(f"{path} has no files that end in {', '.join(SUFFIXES)}")
    return _examples(Dataset(path.stem, "", "", "own", 1, "your own", readers.own), paths, split)


def _examples(dataset: Dataset, paths: list[Path], split: str | None) -> Iterator[Example]:
    if split not in (None, *SPLITS):
        raise ConfigError(f"unknown split {split!r}{did_you_mean(str(split), SPLITS)}")
    found = _all_examples(dataset, paths)
    return (example for example in found if split in (None, example.split))


def _all_examples(dataset: Dataset, paths: list[Path]) -> Iterator[Example]:
    kinds = {kind_of_file(path) for path in paths}
    if dataset.kind_of:
        kinds = _kinds(dataset.kind_of, paths)
    for path in paths:
        found = 0
        for row in _labelled(path):
            kind = dataset.kind_of(row) if dataset.kind_of else kind_of_file(path)
            for example in _read_row(dataset, row):
                found += 1
                side = split_of(example, kind, kinds)
                yield replace(example, source=dataset.name, split=side)
        if not found:
            raise DamagedFile(path, "it has rows, but no example to learn from")


def _read_row(dataset: Dataset, row: Row) -> list[Example]:
    """The examples of a row; one of another shape than the reader knows is damaged."""
    try:
        return list(dataset.reader(row))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"not a row of {dataset.name} ({type(error).__name__}: {error})"
        raise row.damaged(problem) from error


def _kinds(kind_of: Callable[[Row], str], paths: Sequence[Path]) -> set[str]:
    return {kind_of(row) for path in paths for row in rows(path)}


def kind_of_file(path: Path) -> str:
    """train, valid or test by the words of a file's name, else all."""
    words = re.split(r"[^a-z]+", path.name.lower())
    return next((KINDS[word] for word in words if word in KINDS), ALL)


def split_of(example: Example, kind: str, kinds: set[str]) -> str:
    """The split of an example, from the kind of its file and the kinds that there are."""
    verdict = next((k for k in ("test", "valid") if k in kinds and len(kinds) > 1), None)
    if kind == verdict:
        return "verdict"
    if verdict == "test" and {"train", "valid"} <= kinds:
        return "selection" if kind == "valid" else "train"
    content = f"{example.prompt}\0{example.completion}".encode()
    number = int.from_bytes(hashlib.sha256(content).digest()[:4], "big") % 100
    if number < 5:
        return "selection"
    return "verdict" if number < 10 and verdict is None else "train"


def _labelled(path: Path) -> Iterator[Row]:
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
    """Token documents and what is learned of each: the completion, or all of a plain text."""
    documents: list[list[int]] = []
    masks: list[list[bool]] = []
    remaining = iter(examples)
    while chunk := list(itertools.islice(remaining, 4096)):
        prompts = tokenizer.encode_batch([example.prompt for example in chunk])
        completions = tokenizer.encode_batch([example.completion for example in chunk])
        for example, prompt, completion in zip(chunk, prompts, completions, strict=True):
            if example.messages:
                ids, said = tokenizer.chat(example.messages)
            else:
                ids = prompt + completion
                said = [False] * len(prompt) + [True] * len(completion)
            documents.append(ids)
            masks.append(said)
    return documents, masks


def fetch(name: str, folder: Path, *, limit: int = 20_000) -> dict[str, Any]:
    """Download a dataset with the library `datasets` and keep it as examples of ours.

    Of each published split at most `limit` rows; 0 means all.
    """
    dataset = find(name)
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            "fetching needs the library datasets", hint="pip install 'agent-forge[data]'"
        ) from None
    place = folder / name
    if place.exists() and not (place / RECORD).exists():
        raise AlreadyExists(
            f"{place} has files that were not fetched", hint="move them, or use another folder"
        )
    try:
        parts = datasets.load_dataset(dataset.hub, dataset.config or None, streaming=True)
        return _keep(dataset, parts, place, limit)
    except ForgeError:
        raise
    except Exception as error:  # whatever the network stack of the library raises
        raise ConfigError(
            f"cannot fetch {name} from {dataset.hub}: {error}",
            hint=f"go online, or put the files into {place} by hand",
        ) from error


def _keep(
    dataset: Dataset, parts: Mapping[str, Iterable[Any]], place: Path, limit: int
) -> dict[str, Any]:
    """Write the examples of all published splits, and where they are from."""
    seen: dict[str, int] = {}
    with files.staging(place) as stage:
        with stage.writing(SAVED) as writer:
            for kind, part in parts.items():
                for example in _fetched(dataset, part, f"{dataset.hub} {kind}", limit):
                    writer.write(_line_of(example, KINDS.get(kind, "train")))
                    seen[kind] = seen.get(kind, 0) + 1
        if not seen:
            raise DamagedFile(dataset.hub, "it has no examples")
        record = {
            **{"name": dataset.name, "hub": dataset.hub, "config": dataset.config},
            **{"licence": dataset.licence, "examples": seen, "limit": limit},
        }
        stage.write_json(RECORD, record)
    return record


def _fetched(dataset: Dataset, part: Any, where: str, limit: int) -> Iterator[Example]:
    for number, value in enumerate(itertools.islice(part, limit or None), start=1):
        yield from _read_row(dataset, Row(value, Path(dataset.hub), f"{where}, row {number}"))


def _line_of(example: Example, kind: str) -> bytes:
    record = {
        **{"prompt": example.prompt, "completion": example.completion},
        **{"choices": list(example.choices), "split": kind},
        **({"tests": list(example.tests)} if example.tests else {}),
    }
    return json.dumps(record).encode() + b"\n"


def verify(name: str, folder: Path) -> dict[str, Any]:
    """Read every line of a dataset: how many examples, of which split, how many twice."""
    paths = local_files(find(name), folder)
    if paths and (paths[0].parent / RECORD).exists():
        files.verify(paths[0].parent)
    counts = dict.fromkeys(SPLITS, 0)
    seen: dict[bytes, str] = {}
    leaked = 0
    for example in read(name, folder):
        counts[example.split] += 1
        content = f"{example.prompt}\0{example.completion}".encode()
        first = seen.setdefault(hashlib.sha256(content).digest(), example.split)
        leaked += first != example.split
    total = sum(counts.values())
    return {
        **{"name": name, "examples": total, "splits": counts},
        **{"duplicates": total - len(seen), "in_two_splits": leaked},
        "bytes": sum(path.stat().st_size for path in paths),
        "files": {str(path): files.sha256_of(path) for path in paths},
    }
