"""From tensors to a network, from files to a tokenizer: whatever does not fit is refused by name.

transformers fills gaps with fresh weights and tells so in a log; here that is an error.
"""

import contextlib
import copy
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import constants as hub
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, dynamic_module_utils
from transformers import core_model_loading as loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.integrations import hub_kernels
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils import DummyObject, logging

from agent_forge.data.tokenizer import refuse_chance
from agent_forge.errors import ConfigError, DamagedFile, ForgeError, HostileInput
from agent_forge.model.folder import CONFIG, MODEL_TYPE, entries
from agent_forge.model.hf import ForgeForCausalLM, build_network
from agent_forge.model.weights import EACH_LAYER, NAMES, Weights
from agent_forge.store import files
from agent_forge.store.tensors import TensorSpec, spec_of

# Settings that would fetch code, read other files than ours or change what a network returns.
IGNORED = NAMES["ignored_settings"]
# Settings that change nothing in what a network computes from the same weights and tokens.
WITHOUT_EFFECT = NAMES["settings_without_effect"]
COUNTED = re.compile(r"^(num|n)_\w*(layer|block|expert|head)")
MOST = 10_000  # layers, heads or experts that a config may count
CONVERTED_BYTES = 2 << 30  # weights that are loaded to see whether they can be converted
TWO_WAY = {"use_bidirectional_attention": (True, "all"), "is_causal": (False,)}
OLD_BUFFERS = r"(^|\.)(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|position_ids)$"
# Where configs of transformers say what each layer is; some compute it from other settings.
LAYER_KINDS = (*EACH_LAYER, "attention_layers", "layers_block_type", "layers_num_experts")
SEES = 1e-4  # of the largest logit: a change of earlier ones by what comes later
LOOKED_AT = 16  # tokens, to see whether a network is causal
SHOWN = 5  # names of tensors in a message


def _never(*given: Any, **named: Any) -> Any:
    from agent_forge.errors import HostileInput  # the code runs within a module of transformers

    place = " ".join(map(str, (*given, *named.values())))
    raise HostileInput(f"{place} asks for code of its own to be run; none is ever run")


def _never_trusted(_: Any, place: Any, local: Any, remote: Any, *given: Any, **named: Any) -> Any:
    from agent_forge.errors import HostileInput

    if remote:
        raise HostileInput(f"{place} asks for code of its own to be run; none is ever run")
    return False


# Every way of transformers to code that is not its own. Others have imported these functions by
# value, so their code is replaced and not their names: nothing is run, and nobody is asked.
for _function in (
    dynamic_module_utils.get_class_from_dynamic_module,
    dynamic_module_utils.get_cached_module_file,
    dynamic_module_utils.get_class_in_module,
    dynamic_module_utils.check_imports,
    hub_kernels.get_kernel,
):
    _function.__code__ = _never.__code__
dynamic_module_utils.resolve_trust_remote_code.__code__ = _never_trusted.__code__


class ExpectedTensors(NamedTuple):
    """The tensors of a network; those in `tied` are others of them again."""

    specs: dict[str, TensorSpec]
    tied: frozenset[str]
    prefix: str = ""  # names of a file may have it or not
    transforms: tuple[Any, ...] = ()  # how transformers renames and joins the tensors of a file
    ignored: str = "(?!)"  # a pattern of tensors that a file may hold for nothing


def load_network(config: Mapping[str, Any], state: Mapping[str, Tensor], place: str) -> nn.Module:
    """A network with these weights, in fp32; tensors that are missing or left over are an error."""
    needed = _compare(config, _specs(state), place)
    if config["model_type"] == MODEL_TYPE:
        network = build_network(dict(config))
        network.load_state_dict({own_name(name): tensor for name, tensor in state.items()})
        return network
    # Copied: a mapped tensor may lie at another alignment and then give other bits.
    copies = {
        name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in state.items()
        if name in needed.specs or not _is_ignored(name, needed)
    }
    kind, shape = _architecture(config, place)
    with refusing(place):
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        options |= {"state_dict": copies, "dtype": torch.float32}
        model, report = kind.from_pretrained(None, config=shape, **options)
    _refuse(place, "missing", report["missing_keys"])
    _refuse(place, "not of this network", report["unexpected_keys"])
    _refuse(place, "of another shape", [name for name, *_ in report["mismatched_keys"]])
    if report.get("error_msgs"):
        raise DamagedFile(place, f"transformers cannot use it ({report['error_msgs'][0]})")
    with refusing(place), torch.no_grad():  # a config may fit and still not work
        tokens = _with_other_ends(model.eval())
        logits = model(tokens).logits
    if not bool(logits.isfinite().all()):
        raise DamagedFile(place, "its network gives NaN or infinity")
    before = logits[:, : tokens.shape[1] // 2]
    if float((before - before[:1]).abs().max()) > SEES * float(logits.abs().max()):
        raise ConfigError(f"{place} is no causal language model: it sees the token it is asked for")
    return model  # type: ignore[no-any-return]


def _with_other_ends(model: Any) -> Tensor:
    """Texts with the same first half; what follows is as different as the embedding has it."""
    own = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight
    longest = longest_text(model)
    half = max(1, min(LOOKED_AT, longest if isinstance(longest, int) else LOOKED_AT) // 2)
    tokens = torch.randint(len(embedding), (3, 2 * half), generator=own)
    tokens[:, :half] = tokens[0, :half]
    along = embedding @ torch.randn(embedding.shape[1], generator=own)
    tokens[1, half:], tokens[2, half:] = along.argmin(), along.argmax()
    return tokens


def longest_text(model: Any) -> Any:
    """The tokens that a model can read, as its config has it; None if that has no limit."""
    config = model.config
    longest = getattr(config, "max_position_embeddings", 0) or getattr(config, "max_seq_len", 0)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    for table in tables:  # positions that begin behind the one of padding
        if table.num_embeddings == longest and table is not model.get_input_embeddings():
            return longest if table.padding_idx is None else longest - table.padding_idx - 1
    return longest or None


def check_tensors(weights: Weights) -> bool:
    """Refuse weights that are not those of the network in their config, from headers alone."""
    # Returns False if they could not be compared: merges know more than transformers does.
    config, own = weights.config, weights.config.get("model_type") == MODEL_TYPE
    if not own and not _is_causal(config):
        return False
    needed = _compare(config, weights.specs, weights.label)
    if own or {*needed.specs} - needed.tied == {*weights.specs} - needed.tied:
        return True
    if weights.nbytes > CONVERTED_BYTES:  # too many for transformers to convert their names
        return False
    load_network(config, dict(weights), weights.label)
    return True


def check_result(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], place: str) -> None:
    """Refuse tensors, not yet computed, that would not be those of the network in a config."""
    own = config.get("model_type") == MODEL_TYPE
    if own or _is_causal(config):
        needed = _compare(config, specs, place)
        if not own and not any(len(t.target_patterns) > 1 for t in needed.transforms):
            targets = {target for target, _ in _targets(needed, specs).values()}
            _refuse(place, "missing", {*needed.specs} - targets - needed.tied)


def layer_kinds(config: Mapping[str, Any], *, computed: bool = True) -> dict[str, list[Any]]:
    """What each layer is, as transformers completes a config; empty if it does not know it."""
    # `computed`: with lists that follow from other settings, so that a config cannot hold them.
    if config.get("model_type") == MODEL_TYPE or not _is_causal(config):
        return {}
    shape = completed(config, str(config["model_type"]))
    found = {k: getattr(shape, k, None) for k in LAYER_KINDS if computed or k in vars(shape)}
    return {key: list(value) for key, value in found.items() if isinstance(value, list | tuple)}


def own_name(name: str) -> str:
    """A tensor of our network; transformers writes a prefix before it."""
    return name.removeprefix(f"{ForgeForCausalLM.base_model_prefix}.")


def _specs(state: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: spec_of(tensor) for name, tensor in state.items()}


def _needed(config: Mapping[str, Any], place: str) -> ExpectedTensors:
    """The tensors that the network of a config needs; fine-tunes of one base share the answer."""
    _refuse_counts(config, place)
    if config["model_type"] != MODEL_TYPE:
        _architecture(config, place)
    with refusing(place):
        return _needed_by(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=16)
def _needed_by(text: str) -> ExpectedTensors:
    """The same, from a network without memory, so that a config of any size costs nothing."""
    config = json.loads(text)
    with torch.device("meta"):
        if config["model_type"] == MODEL_TYPE:
            return ExpectedTensors(_specs(build_network(config).state_dict()), frozenset())
        kind, shape = _architecture(config, "")
        skeleton = kind(shape)
    ignored = [f"({p})" for p in skeleton._keys_to_ignore_on_load_unexpected or ()]
    specs, tied = _specs(skeleton.state_dict()), frozenset(skeleton.all_tied_weights_keys)
    prefix, transforms = skeleton.base_model_prefix, tuple(get_model_conversion_mapping(skeleton))
    return ExpectedTensors(specs, tied, prefix, transforms, "|".join([*ignored, OLD_BUFFERS]))


def _compare(
    config: Mapping[str, Any], stored: Mapping[str, TensorSpec], place: str
) -> ExpectedTensors:
    """Refuse tensors that are not those of the network in a config; returns what it needs."""
    needed = _needed(config, place)
    if config["model_type"] != MODEL_TYPE:
        _refuse_early(needed, stored, place)
        _refuse_surplus(needed, stored, place)
        return needed
    for names in _alike(stored, own_name):
        if not needed.specs.keys() >= {*names}:
            _refuse(place, "two names for one", names)
    own = {own_name(name): spec for name, spec in stored.items()}
    _refuse(place, "missing", needed.specs.keys() - own.keys())
    _refuse(place, "not of this network", own.keys() - needed.specs.keys())
    _refuse_early(needed, own, place)
    return needed


def _refuse_early(needed: ExpectedTensors, stored: Mapping[str, TensorSpec], place: str) -> None:
    """Refuse what cannot fit before a network of the config's size takes memory."""
    pairs = {name: (spec, stored[name]) for name, spec in needed.specs.items() if name in stored}
    _refuse(place, "of another shape", [n for n, (a, b) in pairs.items() if a.shape != b.shape])
    coded = [n for n, (a, b) in pairs.items() if a.is_floating and not b.is_floating]
    _refuse(place, "no weights but whole numbers", coded)
    own = sum(spec.numel for name, spec in needed.specs.items() if name not in needed.tied)
    if own > sum(spec.numel for spec in stored.values()):
        _refuse(place, "missing", {*needed.specs} - {*stored} - needed.tied)


def _refuse_surplus(needed: ExpectedTensors, stored: Iterable[str], place: str) -> None:
    """Refuse names that stand for no tensor of the network, and two that stand for one."""
    # transformers drops the former, and of the latter takes the one that comes last by its name.
    expected = {*needed.specs}
    if expected.issuperset(names := {*stored}):
        return
    targets = _targets(needed, names)
    renamings, _ = _transforms(needed)
    prefixes = re.compile(rf"^({re.escape(needed.prefix)}\.)+" if needed.prefix else "(?!)")
    used = [name for name, (target, _) in targets.items() if target in expected]
    rename = loading.apply_renamings
    for alike in _alike(used, lambda name: prefixes.sub("", rename(name, renamings))):
        if not expected.issuperset(alike):
            _refuse(place, "two names for one", alike)
    for several in _alike(used, lambda name: targets[name][0]):  # right only as parts of one
        if any(targets[name][1] is None for name in several):
            _refuse(place, "two names for one", several)
    strange = [n for n in targets if n not in used and not _is_ignored(n, needed)]
    _refuse(place, "not of this network", strange)


def _alike(names: Iterable[str], key: Callable[[str], str]) -> list[list[str]]:
    """The groups of several names with the same key."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[key(name)].append(name)
    return [group for group in groups.values() if len(group) > 1]


def _targets(needed: ExpectedTensors, stored: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """The tensor that each name stands for, and the pattern that joins it to others."""
    # As in transformers' own loading, which goes by the names in this order.
    renamings, converters = _transforms(needed)
    network = needed.prefix, needed.specs
    targets: dict[str, tuple[str, str | None]] = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        targets[name] = loading.rename_source_key(name, renamings, converters, *network)
        if targets[name][0] not in needed.specs and name in needed.specs:
            targets[name] = loading.rename_source_key(name, [], [], *network)
    return targets


def _transforms(needed: ExpectedTensors) -> tuple[list[Any], list[Any]]:
    """Fresh renamings and converters: some of them remember what they have met."""
    fresh = copy.deepcopy(needed.transforms)
    converters = [t for t in fresh if isinstance(t, loading.WeightConverter)]
    return [t for t in fresh if not isinstance(t, loading.WeightConverter)], converters


def _is_ignored(name: str, needed: ExpectedTensors) -> bool:
    """True for buffers of old files; a pattern of transformers may fit weights as well."""
    weight = any(other.endswith(f".{name}") or name.endswith(f".{other}") for other in needed.specs)
    return not weight and re.search(needed.ignored, name) is not None


def _is_causal(config: Mapping[str, Any]) -> bool:
    """True if transformers has a causal language model for this config."""
    known = CONFIG_MAPPING_NAMES.get(str(config.get("model_type")))
    return known is not None and CONFIG_MAPPING[config["model_type"]] in MODEL_FOR_CAUSAL_LM_MAPPING


def _architecture(config: Mapping[str, Any], place: str) -> tuple[Any, Any]:
    """The class of the network and its config; nothing in a config makes it fetch or run code."""
    model_type = config["model_type"]
    if not _is_causal(config):
        version = transformers.__version__
        problem = f"transformers {version} knows no causal language model {model_type!r}"
        raise DamagedFile(place, problem)
    if any(key == "quantization_config" and value for key, value in entries(config)):
        raise ConfigError(f"{place} is quantised; only whole weights are read")
    _refuse_counts(config, place)
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key, values in TWO_WAY.items():
            if part.get(key) in values:  # a token would see those after it
                problem = f"its config says {key} = {part[key]!r}"
                raise ConfigError(f"{place} is no causal language model: {problem}")
    with refusing(place):
        shape = CONFIG_MAPPING[model_type].from_dict(_readable(config))
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(shape)]
    return (kind[0] if isinstance(kind, tuple) else kind), shape


def completed(config: Mapping[str, Any], place: str) -> Any:
    """A config as transformers completes it, with the defaults of its kind."""
    return _architecture(config, place)[1]


def computing_settings(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The settings of a network that change what it computes, with the defaults of its kind."""
    known = config if not _is_causal(config) else completed(config, place).to_dict()
    return {
        key: value
        for key, value in known.items()
        if key not in WITHOUT_EFFECT and "dropout" not in key and not key.startswith("_")
    }


def _readable(value: Any) -> Any:
    """A config without what is ignored; transformers writes {"__float__": "Infinity"} in it."""
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity"):
        return float(value["__float__"])
    return {key: _readable(item) for key, item in value.items() if key not in IGNORED}


def _refuse_counts(config: Mapping[str, Any], place: str) -> None:
    """Refuse numbers of layers that nobody has: a network of them would take forever to build."""
    for key, value in entries(config):
        if isinstance(value, int | float) and COUNTED.search(key) and not 0 <= value <= MOST:
            raise DamagedFile(place, f"its config says {key} = {value}")


def _refuse(place: str, what: str, names: Iterable[str]) -> None:
    if names := sorted(names):
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        hint = "fetch it again; a number that fills the gaps with noise would mean nothing"
        raise DamagedFile(place, f"tensors are {what}: {', '.join(names[:SHOWN])}{more}", hint=hint)


@contextlib.contextmanager
def refusing(place: str | Path) -> Iterator[None]:
    """Turn whatever transformers raises about files that are not ours into DamagedFile."""
    # Nothing is downloaded meanwhile, whatever the files name.
    logging.disable_progress_bar()
    before, offline = logging.get_verbosity(), hub.HF_HUB_OFFLINE
    if before != logging.CRITICAL:  # a change empties the caches of all loggers, which takes long
        logging.set_verbosity(logging.CRITICAL)
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    except (ForgeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers' library is no Exception
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise DamagedFile(place, f"transformers cannot use it ({first})") from error
    finally:
        if before != logging.CRITICAL:
            logging.set_verbosity(before)
        hub.HF_HUB_OFFLINE = offline


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of any maker. Nothing is downloaded and no code of the folder is run."""
    with refusing(folder):
        for path in (folder / CONFIG, folder / "tokenizer_config.json"):
            name = files.read_json(path).get("tokenizer_class") if path.is_file() else None
            for kind in map(tokenizer_class_from_name, (name, f"{name}Fast") if name else ()):
                # A processor opens whatever its own settings name. What needs a library that is
                # missing is a DummyObject, and raises when used.
                base = transformers.PreTrainedTokenizerBase
                fits = isinstance(kind, type) and issubclass(kind, base)
                if not (kind is None or isinstance(kind, DummyObject) or fits):
                    hint = "name the class of its tokenizer, or remove tokenizer_class in a copy"
                    problem = f"{path}: tokenizer_class {name!r} is no tokenizer of transformers"
                    raise HostileInput(problem, hint=hint)
        options = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        if core := getattr(tokenizer, "backend_tokenizer", None):
            refuse_chance(core, folder)
        if tokenizer.init_kwargs.get("sp_model_kwargs"):  # may draw lots, and so on
            raise ConfigError(f"{folder}: sp_model_kwargs of its tokenizer are not supported")
        return tokenizer
