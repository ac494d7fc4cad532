"""From tensors to a network, from files to a tokenizer: whatever does not fit is refused by name.

transformers fills gaps with fresh weights and tells so in a log; here the names, shapes and types
of the file have to be those of the network. Nothing in a folder makes it fetch or run code.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer
from transformers import __version__ as VERSION
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from agent_forge.errors import ConfigError, DamagedFile, ForgeError
from agent_forge.model.folder import MODEL_TYPE, entries
from agent_forge.model.hf import ForgeForCausalLM, build_network
from agent_forge.model.weights import Weights
from agent_forge.store.tensors import Spec, spec_of

# Settings that would fetch code, read other files than ours or change what a network returns.
IGNORED = """
    attn_implementation _attn_implementation experts_implementation _experts_implementation
    fusion_config transformers_weights kernel_config return_dict torchscript output_attentions
    output_hidden_states
"""
COUNTED = re.compile(r"^(num|n)_\w*(layer|block|expert|head)")
MOST = 10_000  # layers, heads or experts that a config may count
CONVERTED_BYTES = 2 << 30  # weights that are loaded to see whether they can be converted
SHOWN = 5  # names of tensors in a message


class Needed(NamedTuple):
    """The tensors of a network; those in `tied` are others of them again."""

    specs: dict[str, Spec]
    tied: frozenset[str]


def load_network(config: Mapping[str, Any], state: Mapping[str, Tensor], place: str) -> nn.Module:
    """A network with these weights, in fp32; tensors that are missing or left over are an error."""
    if config["model_type"] == MODEL_TYPE:
        own = {own_name(name): tensor for name, tensor in state.items()}
        _compare(_needed(config, place), _specs(own), place)
        network = build_network(dict(config))
        network.load_state_dict(own)
        return network
    _refuse_early(_needed(config, place), _specs(state), place)
    # Copied: a mapped tensor may lie at another alignment and then give other bits.
    copies = {
        name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in state.items()
    }
    kind, shape = _architecture(config, place)
    with refusing(place):
        told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        weights = {"state_dict": copies, "dtype": torch.float32}
        model, report = kind.from_pretrained(None, config=shape, **weights, **told)
    _refuse(place, "missing", report["missing_keys"])
    _refuse(place, "not of this network", report["unexpected_keys"])
    _refuse(place, "of another shape", [name for name, *_ in report["mismatched_keys"]])
    if report.get("error_msgs"):
        raise DamagedFile(place, f"transformers cannot use it ({report['error_msgs'][0]})")
    with refusing(place), torch.no_grad():  # a config may fit and still not work
        logits = model.eval()(torch.tensor([[0, 0], [0, 1]])).logits
    if not bool(logits.isfinite().all()):
        raise DamagedFile(place, "its network gives NaN or infinity")
    if not torch.allclose(logits[0, 0], logits[1, 0], rtol=1e-3, atol=1e-3):
        raise ConfigError(f"{place} is no causal language model: it sees the token it is asked for")
    return model  # type: ignore[no-any-return]


def check_tensors(weights: Weights) -> bool:
    """Refuse weights that are not those of the network in their config, from headers alone.

    Returns False if they could not be compared: merges know more architectures than transformers.
    Where names are not the network's own, transformers converts them if they are not too many.
    """
    config, place = weights.config, weights.label
    if config.get("model_type") == MODEL_TYPE:
        own = {own_name(name): spec for name, spec in weights.specs.items()}
        _compare(_needed(config, place), own, place)
        return True
    if not _is_causal(config):
        return False
    needed = _needed(config, place)
    _refuse_early(needed, weights.specs, place)
    if {*needed.specs} - needed.tied == {*weights.specs} - needed.tied:
        return True
    if weights.nbytes > CONVERTED_BYTES:
        return False
    load_network(config, {name: weights[name] for name in weights}, place)
    return True


def own_name(name: str) -> str:
    """A tensor of our network; transformers writes a prefix before it."""
    return name.removeprefix(f"{ForgeForCausalLM.base_model_prefix}.")


def _specs(state: Mapping[str, Tensor]) -> dict[str, Spec]:
    return {name: spec_of(tensor) for name, tensor in state.items()}


def _needed(config: Mapping[str, Any], place: str) -> Needed:
    """The tensors that the network of a config needs; fine-tunes of one base share the answer."""
    _refuse_counts(config, place)
    with refusing(place):
        text = json.dumps(config, sort_keys=True)
    if config["model_type"] == MODEL_TYPE:
        return _needed_by(text, None)
    kind, _ = _architecture(config, place)
    with refusing(place):
        return _needed_by(text, kind)


@lru_cache(maxsize=16)
def _needed_by(text: str, kind: Any) -> Needed:
    """The same, from a network without memory, so that a config of any size costs nothing."""
    config = json.loads(text)
    with torch.device("meta"):
        if kind is None:
            return Needed(_specs(build_network(config).state_dict()), frozenset())
        skeleton = kind(_architecture(config, "")[1])
    return Needed(_specs(skeleton.state_dict()), frozenset(skeleton.all_tied_weights_keys))


def _compare(needed: Needed, found: Mapping[str, Spec], place: str) -> None:
    _refuse(place, "missing", set(needed.specs) - set(found))
    _refuse(place, "not of this network", set(found) - set(needed.specs))
    _refuse_early(needed, found, place)


def _refuse_early(needed: Needed, found: Mapping[str, Spec], place: str) -> None:
    """Refuse what cannot fit before a network of the config's size takes memory."""
    both = [name for name in needed.specs if name in found]
    other = [name for name in both if needed.specs[name].shape != found[name].shape]
    _refuse(place, "of another shape", other)
    coded = [n for n in both if needed.specs[n].is_floating and not found[n].is_floating]
    _refuse(place, "no weights but whole numbers", coded)
    own = sum(spec.numel for name, spec in needed.specs.items() if name not in needed.tied)
    if own > sum(spec.numel for spec in found.values()):
        _refuse(place, "missing", set(needed.specs) - set(found) - needed.tied)


def _is_causal(config: Mapping[str, Any]) -> bool:
    """True if transformers has a causal language model for this config."""
    known = CONFIG_MAPPING_NAMES.get(str(config.get("model_type")))
    return known is not None and CONFIG_MAPPING[config["model_type"]] in MODEL_FOR_CAUSAL_LM_MAPPING


def _architecture(config: Mapping[str, Any], place: str) -> tuple[Any, Any]:
    """The class of the network and its config; nothing in a config makes it fetch or run code."""
    model_type = config["model_type"]
    if not _is_causal(config):
        raise DamagedFile(
            place, f"transformers {VERSION} knows no causal language model {model_type!r}"
        )
    if config.get("quantization_config"):
        raise ConfigError(f"{place} is quantised; only whole weights are read")
    _refuse_counts(config, place)
    kept = {key: value for key, value in config.items() if key not in IGNORED.split()}
    with refusing(place):
        shape = CONFIG_MAPPING[model_type].from_dict(kept)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(shape)]
    return (kind[0] if isinstance(kind, tuple) else kind), shape


def _refuse_counts(config: Mapping[str, Any], place: str) -> None:
    """Refuse numbers of layers that nobody has: a network of them would take forever to build."""
    for key, value in entries(config):
        if isinstance(value, int | float) and COUNTED.search(key) and not 0 <= value <= MOST:
            raise DamagedFile(place, f"its config says {key} = {value}")


def _refuse(place: str, what: str, names: Iterable[str]) -> None:
    if found := sorted(names):
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise DamagedFile(
            place,
            f"tensors are {what}: {', '.join(found[:SHOWN])}{more}",
            hint="fetch it again; a number that fills the gaps with noise would mean nothing",
        )


@contextlib.contextmanager
def refusing(place: str | Path) -> Iterator[None]:
    """Turn whatever transformers raises about files that are not ours into DamagedFile."""
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except (ForgeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers' library is no Exception
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise DamagedFile(place, f"transformers cannot use it ({first})") from error
    finally:
        logging.set_verbosity(before)


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of any maker. Nothing is downloaded and no code of the folder is run."""
    with refusing(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
