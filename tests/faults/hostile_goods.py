"""Good small models and data, what a hostile case is, and the tools that break one thing."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agent_forge.config.settings import ModelSettings
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.support.merge_models import OWN
from tests.support.tokenizers import CHAT, TEXTS, byte_tokenizer

RIGHT = frozenset({0})  # odd, but there is one right result
REFUSED = frozenset({2, 4})  # a number or a model from it would be wrong, or it is hostile
EITHER = RIGHT | REFUSED  # whether it is used or refused is a matter of taste; the rest is not
TOO_LARGE = REFUSED | {5}

MERGES = ("merge", "merge-first", "merge-base", "merge-dry")
FAMILIES = ("llama", "gpt2", "qwen2", "ours")
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
BAD, LIKE = "bad", "like"  # folders that a case makes: what is wrong, and a sound model equal to it
SHAPE = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "max_position_embeddings": 64}

Make = Callable[[Path, Path], str]  # an empty folder to fill, a good model -> what the user names
Change = Callable[[Path], object]  # of a model folder; its parent is the folder of the case
State = dict[str, Tensor]


class Case(NamedTuple):
    """One input that is broken or hostile, and what may come of it."""

    name: str
    kind: str  # model | adapter | recipe | data | lineage: the commands that take it
    make: Make
    allowed: frozenset[int] = REFUSED
    says: str = ""  # a regular expression for the message of a refusal
    family: str = "llama"
    talks: bool = False  # measured on conversations, which go through the chat template
    where: Mapping[str, frozenset[int]] = {}  # commands with exit codes of their own
    same: bool = True  # if it is used, it does as the good model does (or as LIKE, if that is made)


def lenient(*commands: str) -> dict[str, frozenset[int]]:
    """These commands may do with a case what they like: it is not in their way."""
    return dict.fromkeys(commands, EITHER)


# Of two parents an evolution takes the first one's config, tokenizer and template; a merge computes
# without any of them.
AS_SECOND = lenient("evo", "evo-dry", *MERGES)
CONTENT = lenient("evo-dry", "merge-dry")  # a dry run reads no weights


def model(name: str, *changes: Change, **rest: Any) -> Case:
    """A case that is a good model with these changes."""
    return Case(name, "model", changed(*changes), **rest)


# -- good ones ------------------------------------------------------------------------------------


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hostile-goods-")


@functools.cache
def goods() -> Path:
    """A folder with FAMILY/a and FAMILY/b, rows.jsonl and talks.jsonl."""
    root = Path(_folder().name)
    for family in ("llama", "gpt2", "qwen2"):
        _foreign(root / family, family)
    _ours(root)
    rows = [{"prompt": f"{n}+{n}=", "completion": f" {n + n}"} for n in range(60)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    talks = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]
        for n in range(60)
    ]
    lines = (json.dumps({"messages": talk}) for talk in talks)
    (root / "talks.jsonl").write_text("\n".join(lines))
    return root


def _foreign(root: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

    torch.manual_seed(FAMILIES.index(family))
    config = {
        "llama": lambda: LlamaConfig(**SHAPE),
        "qwen2": lambda: Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True),
        "gpt2": lambda: GPT2Config(vocab_size=260, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    }[family]()
    model = AutoModelForCausalLM.from_config(config)
    for name in "ab":
        model.save_pretrained(root / name)
        byte_tokenizer(CHAT).save_pretrained(root / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.002 * torch.randn_like(parameter))


def _ours(root: Path) -> None:
    sessions = SessionStore(root / "storage")
    sessions.create({"preset": "smoke"}, "preset: smoke\n", session_id="s1")
    storage = ModelStorage(sessions.root, sessions.registry)
    torch.manual_seed(0)
    model = ForgeNetwork(ModelSettings.model_validate(OWN))
    tokens = Tokenizer.train(TEXTS * 9, model.settings.vocab_size).files()
    for name in "ab":
        config = config_dict(model.settings)
        storage.save_model(model, "s1", "cognate", name, {}, config=config, tokenizer_files=tokens)
        shutil.copytree(storage.find(f"cognate.{name}.s1"), root / "ours" / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.002 * torch.randn_like(parameter))


# -- the canary -----------------------------------------------------------------------------------


def canary_of(folder: Path) -> Path:
    """The folder that exists if code of a case has run."""
    return folder.parent / "canary"


def singing(folder: Path) -> str:
    """Python that makes the canary, whatever is wanted of the module."""
    names = ("Evil", "EvilConfig", "EvilForCausalLM", "EvilTokenizer")
    classes = "".join(f"class {name}: pass\n" for name in names)
    made = f"__import__('os').makedirs({str(canary_of(folder))!r}, exist_ok=True)\n"
    return f"{made}{classes}def generate(*a, **k):\n    {made}"


class Canary:
    """Unpickling it makes the canary."""

    def __init__(self, folder: Path) -> None:
        self.path = canary_of(folder)

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def pickled(folder: Path) -> bytes:
    return pickle.dumps(Canary(folder))


# -- breaking -------------------------------------------------------------------------------------


def changed(*changes: Change) -> Make:
    """A copy of the good model with these changes."""

    def make(folder: Path, good: Path) -> str:
        bad = copied(good, folder / BAD)
        for change in changes:
            change(bad)
        return str(bad)

    return make


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def text(name: str, content: str | bytes) -> Change:
    """A file with this content."""
    raw = content.encode() if isinstance(content, str) else content

    def change(bad: Path) -> None:
        (bad / name).parent.mkdir(parents=True, exist_ok=True)
        (bad / name).write_bytes(raw)

    return change


def without(*names: str) -> Change:
    def change(bad: Path) -> None:
        for name in names:
            (bad / name).unlink(missing_ok=True)

    return change


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {}


def keys(name: str, /, **values: Any) -> Change:
    """A JSON file with these keys set."""
    return lambda bad: (bad / name).write_text(json.dumps({**read(bad / name), **values}))


def config(**values: Any) -> Change:
    return keys(CONFIG, **values)


def no_keys(name: str, *unwanted: str) -> Change:
    def change(bad: Path) -> None:
        kept = {k: v for k, v in read(bad / name).items() if k not in unwanted}
        (bad / name).write_text(json.dumps(kept))

    return change


def bytes_of(name: str, edit: Callable[[bytes], bytes]) -> Change:
    return lambda bad: (bad / name).write_bytes(edit((bad / name).read_bytes()))


def tensors(edit: Callable[[State], State | None]) -> Change:
    """The weights, edited in place or replaced."""

    def change(bad: Path) -> None:
        state = load_file(bad / WEIGHTS)
        edited = edit(state)
        save(bad / WEIGHTS, state if edited is None else edited)

    return change


def save(path: Path, state: State) -> None:
    save_file({k: v.contiguous().clone() for k, v in state.items()}, path, {"format": "pt"})


def lost(*parts: str) -> Change:
    """Without the tensors that have one of these in their names."""

    def edit(state: State) -> State:
        kept = {k: v for k, v in state.items() if not any(part in k for part in parts)}
        assert len(kept) < len(state)
        return kept

    return tensors(edit)


def more(extra: State) -> Change:
    """With further tensors."""
    return tensors(lambda state: {**state, **extra})


def mapped(name: str, edit: Callable[[Tensor], Tensor]) -> Change:
    """One tensor, edited."""
    return tensors(lambda state: {**state, name: edit(state[name])})


def each(edit: Callable[[Tensor], Tensor]) -> Change:
    """All tensors, edited."""
    return tensors(lambda state: {k: edit(v) for k, v in state.items()})


def renamed(edit: Callable[[str], str]) -> Change:
    return tensors(lambda state: {edit(k): v for k, v in state.items()})


def raw_safetensors(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file, right or wrong."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def headed(edit: Callable[[dict[str, Any]], object]) -> Change:
    """The header of the weights, edited in place."""

    def rewrite(content: bytes) -> bytes:
        header, data = header_of(content)
        edit(header)
        return raw_safetensors(header, data)

    return bytes_of(WEIGHTS, rewrite)


def fifo(name: str) -> Change:
    """A named pipe that nobody writes to, in place of a file."""

    def change(bad: Path) -> None:
        (bad / name).unlink(missing_ok=True)
        os.mkfifo(bad / name)

    return change


def directory(name: str) -> Change:
    def change(bad: Path) -> None:
        (bad / name).unlink(missing_ok=True)
        (bad / name).mkdir()

    return change


def linked(name: str, target: Callable[[Path], Path | str]) -> Change:
    """A symbolic link in place of a file."""

    def change(bad: Path) -> None:
        place = target(bad)
        (bad / name).unlink(missing_ok=True)
        (bad / name).symlink_to(place)

    return change


def moved_out(name: str) -> Change:
    """The file outside the folder, and a link to it in its place."""

    def target(bad: Path) -> Path:
        shutil.move(bad / name, bad.parent / f"outside-{name}")
        return bad.parent / f"outside-{name}"

    return linked(name, target)


def code(name: str) -> Change:
    """A file of Python that makes the canary."""
    return lambda bad: text(name, singing(bad.parent))(bad)


def torch_file(name: str, content: Callable[[Path], Any], **how: Any) -> Change:
    """A file of torch.save."""
    return lambda bad: torch.save(content(bad), bad / name, **how)


INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(bad: Path) -> None:
    """The weights in two shards."""
    state = load_file(bad / WEIGHTS)
    names = sorted(state)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    for shard, half in zip(SHARDS, halves, strict=True):
        save(bad / shard, {name: state[name] for name in half})
    table = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    total = sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": table}
    (bad / INDEX).write_text(json.dumps(index))
    (bad / WEIGHTS).unlink()


def weight_map(edit: Callable[[dict[str, Any]], Any]) -> Change:
    """The table of an index, edited in place or replaced."""

    def change(bad: Path) -> None:
        index = read(bad / INDEX)
        edited = edit(index["weight_map"])
        if edited is not None:
            index["weight_map"] = edited
        (bad / INDEX).write_text(json.dumps(index))

    return change
