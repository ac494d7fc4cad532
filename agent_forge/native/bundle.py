"""A bundle: one folder with a model and the C program that runs it, for machines without Python.

The program is forge_run.c with the files of SOURCES; `make` builds it with any gcc or clang.
"""

from pathlib import Path

from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotFound
from agent_forge.store import files

HERE = Path(__file__).parent
MODEL_TYPE = "agent_forge"  # of config.json, as in model/folder.py
MODEL = ("model.safetensors", "config.json", "tokenizer.json")
SOURCES = (
    "forge_run.c",
    "json.h",
    "entropy.h",
    "tokenizer.h",
    "unicode.h",
    "weights.h",
    "network.h",
    "linear.h",
    "step.h",
    "plain.c",
    "avx2.c",
)
MAKEFILE = "bundle.mk"
OVERHEAD_BYTES = 1 << 20  # sources, README and manifest
README = """# A model of Agent Forge, with the program that runs it

    make                                        # with gcc or clang; needs libc and libm alone
    ./forge_run . "Once upon a time"            # continues a text
    ./forge_run . "What is 12 + 30?" --chat     # replies; a thought goes to stderr
    ./forge_run . "Once upon a time" --bench    # tokens a second
    ./forge_run --help

`make` builds for this machine; `make CFLAGS=-O3` for any of its kind. The processor has to be
little-endian, as x86 and ARM are. Exit code 2: a file or an option was refused, with the reason.

`model.safetensors`, `config.json` and `tokenizer.json` are a model folder, which `forge generate`
and `forge chat` open as well; `manifest.json` has the sha256 sums of all files.
"""


def write_bundle(model_folder: Path, out: Path, *, dry_run: bool = False) -> dict[str, int]:
    """Write a folder that runs a model of ours, packed or whole, at `out`; one that is there
    already is left as it is. Returns the bytes of each file; `dry_run` writes none."""
    if out.exists():
        raise AlreadyExists(f"{out} exists; it stays", hint="name a folder that does not")
    records = _checked(model_folder)
    places = [*(model_folder / name for name in MODEL), *(HERE / name for name in SOURCES)]
    sizes = {place.name: place.stat().st_size for place in places}
    files.require_space(out, sum(sizes.values()) + OVERHEAD_BYTES)
    if dry_run:
        return sizes
    with files.staging(out, replace=False) as stage:
        for name in MODEL:
            stage.copy(model_folder / name)
            if records and stage.records[name] != records.get(name):
                raise DamagedFile(model_folder / name, "it is not what its manifest says")
        for name in SOURCES:
            stage.copy(HERE / name)
        stage.copy(HERE / MAKEFILE, "Makefile")
        stage.write_bytes("README.md", README.encode())
    return sizes


def _checked(folder: Path) -> files.FileRecords:
    """The records of a folder's manifest, if it has one; a folder that the program would refuse is
    refused here."""
    for name in MODEL:
        if not (folder / name).is_file():
            raise NotFound(f"{folder} has no {name}")
    config = files.read_json(folder / "config.json")
    if not isinstance(config, dict) or config.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"{folder} holds no network of Agent Forge: the program runs no other")
    has_manifest = (folder / files.MANIFEST).is_file()
    return files.verify(folder, content=False) if has_manifest else {}
