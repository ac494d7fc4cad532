"""Hugging Face interop: the one module that imports transformers.

Importing it registers our network with the Auto classes, so that a model directory of ours opens
with `AutoModelForCausalLM.from_pretrained`, without remote code. `generate` of transformers works
and recomputes the text for every token; `agent_forge.infer` has the cached generation.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as VERSION
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from agent_forge.config.load import check
from agent_forge.config.settings import ModelSettings
from agent_forge.errors import ConfigError, DamagedFile, ForgeError
from agent_forge.model.folder import MODEL_TYPE, entries, home_of, open_model
from agent_forge.model.loss import IGNORE
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.weights import Weights
from agent_forge.store import files


class ForgeConfig(PretrainedConfig):  # type: ignore[misc]
    """The shape of a network in the form that transformers keeps in config.json."""

    model_type = MODEL_TYPE

    def __init__(self, **values: Any) -> None:
        shape = {name: values.pop(name) for name in ModelSettings.model_fields if name in values}
        self.shape = check(ModelSettings, shape, "config.json").model_dump()
        values = {"tie_word_embeddings": True, "use_cache": False, **values}
        values.pop("shape", None)
        super().__init__(**values)
        for name, value in self.shape.items():
            setattr(self, name, value)
        self.hidden_size, self.num_hidden_layers = self.d_model, self.n_layers
        self.num_attention_heads = self.n_heads

    def settings(self) -> ModelSettings:
        """The settings that the network is built from."""
        names = ModelSettings.model_fields
        return ModelSettings.model_validate({name: getattr(self, name) for name in names})


class ForgeForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Our network behind the interface of transformers."""

    config_class = ForgeConfig
    base_model_prefix = "network"

    def __init__(self, config: ForgeConfig) -> None:
        super().__init__(config)
        self.network = ForgeNetwork(config.settings())
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The network has initialised itself."""

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.network.embedding

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """Logits of every position; with labels also the mean loss of predicting the next token."""
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            logits = self._padded_on_the_left(input_ids, attention_mask)
        else:
            logits = self.network(input_ids)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
            )
        return CausalLMOutput(loss=loss, logits=logits)

    def _padded_on_the_left(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """As batches to generate from come: rows begin at their first token, as if alone."""
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        before = mask_BT.long().argmax(1, keepdim=True)
        moved = tokens_BT.gather(1, (places + before).clamp(max=len(places) - 1))
        logits = self.network(moved)
        return torch.take_along_dim(logits, (places - before).clamp(min=0)[..., None], dim=1)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def config_dict(settings: ModelSettings) -> dict[str, Any]:
    """config.json of a model directory that holds a network of this shape."""
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ForgeForCausalLM.__name__],
        "tie_word_embeddings": True,
        "use_cache": False,
        "dtype": "float32",
        **settings.model_dump(mode="json"),
    }


def build_network(config: dict[str, Any]) -> ForgeNetwork:
    """The network of a config.json, for ModelStorage."""
    shape = {name: config[name] for name in ModelSettings.model_fields if name in config}
    return ForgeNetwork(check(ModelSettings, shape, "config.json"))


AutoConfig.register(MODEL_TYPE, ForgeConfig)
AutoModelForCausalLM.register(ForgeConfig, ForgeForCausalLM)


# Settings that would fetch code, or make transformers read other files than ours.
IGNORED = (
    *("attn_implementation", "_attn_implementation", "experts_implementation"),
    *("_experts_implementation", "fusion_config", "transformers_weights", "kernel_config"),
)
COUNTED = re.compile(r"^(num|n)_\w*(layer|block|expert|head)")
MOST = 10_000  # layers, heads or experts that a config may count
CONVERTED_BYTES = 2 << 30  # weights that are loaded to see whether they can be converted
SHOWN = 5  # names of tensors in a message


def load_network(config: Mapping[str, Any], state: Mapping[str, Tensor], place: str) -> nn.Module:
    """A network with these weights, in fp32; tensors that are missing or left over are an error."""
    if config["model_type"] == MODEL_TYPE:
        network = build_network(dict(config))
        _compare(
            {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()},
            {own_name(name): tuple(tensor.shape) for name, tensor in state.items()},
            place,
        )
        network.load_state_dict({own_name(name): tensor for name, tensor in state.items()})
        return network
    kind, shape = _architecture(config, place)
    # Copied: a mapped tensor may lie at another alignment and then give other bits.
    copies = {
        name: tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
        for name, tensor in state.items()
    }
    with _as_damage(place):
        skeleton = _skeleton(kind, shape)  # a config that no network fits takes no memory
        types = {name: weight.dtype for name, weight in skeleton.named_parameters()}
        _refuse(place, "no numbers", [n for n, t in state.items() if _is_coded(t, types.get(n))])
        model, report = kind.from_pretrained(
            None,
            config=shape,
            state_dict=copies,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _refuse(place, "missing", report["missing_keys"])
    _refuse(place, "not of this network", report["unexpected_keys"])
    _refuse(place, "of another shape", [name for name, *_ in report["mismatched_keys"]])
    if report.get("error_msgs"):
        raise DamagedFile(place, f"transformers cannot load it ({report['error_msgs'][0]})")
    with _as_damage(place), torch.no_grad():
        model.eval()(torch.zeros(1, 2, dtype=torch.long))  # a config may fit and still not work
    return model  # type: ignore[no-any-return]


def _is_coded(tensor: Tensor, wanted: torch.dtype | None) -> bool:
    """True for whole numbers where weights belong: the codes of a quantised model."""
    return wanted is not None and wanted.is_floating_point and not tensor.is_floating_point()


def own_name(name: str) -> str:
    """A tensor of our network; transformers writes a prefix before it."""
    return name.removeprefix(f"{ForgeForCausalLM.base_model_prefix}.")


def check_tensors(weights: Weights) -> bool:
    """Refuse weights that are not those of the network in their config, from headers alone.

    Returns False if they could not be compared: merges know more architectures than transformers.
    Where names are not the network's own, transformers converts them if they are not too many.
    """
    config = weights.config
    if config.get("model_type") == MODEL_TYPE:
        network = build_network(dict(config))
        specs = {own_name(name): spec.shape for name, spec in weights.specs.items()}
        needed = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        _compare(needed, specs, weights.label)
        return True
    if not _is_causal(config):
        return False
    kind, shape = _architecture(config, weights.label)
    with _as_damage(weights.label):
        skeleton = _skeleton(kind, shape)
    needed = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    found = {name: spec.shape for name, spec in weights.specs.items()}
    tied = set(skeleton.all_tied_weights_keys)
    if {k: v for k, v in needed.items() if k not in tied} == {
        k: v for k, v in found.items() if k not in tied
    } and all(found[name] == needed[name] for name in tied & set(found)):
        return True
    if weights.nbytes > CONVERTED_BYTES:
        return False
    load_network(config, {name: weights[name] for name in weights}, weights.label)
    return True


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
    kept = {key: value for key, value in config.items() if key not in IGNORED}
    with _as_damage(place):
        shape = CONFIG_MAPPING[model_type].from_dict(kept)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(shape)]
    return (kind[0] if isinstance(kind, tuple) else kind), shape


def _refuse_counts(config: Mapping[str, Any], place: str) -> None:
    """Refuse numbers of layers that nobody has: a network of them would take forever to build."""
    for key, value in entries(config):
        if isinstance(value, int | float) and COUNTED.search(key) and not 0 <= value <= MOST:
            raise DamagedFile(place, f"its config says {key} = {value}")


def _skeleton(kind: Any, shape: Any) -> Any:
    """A network without memory."""
    with torch.device("meta"):
        return kind(copy.deepcopy(shape))


def _compare(needed: Mapping[str, Any], found: Mapping[str, Any], place: str) -> None:
    _refuse(place, "missing", set(needed) - set(found))
    _refuse(place, "not of this network", set(found) - set(needed))
    _refuse(place, "of another shape", [name for name in needed if found[name] != needed[name]])


def _refuse(place: str, what: str, names: Iterable[str]) -> None:
    if found := sorted(names):
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise DamagedFile(
            place,
            f"tensors are {what}: {', '.join(found[:SHOWN])}{more}",
            hint="fetch it again; a number that fills the gaps with noise would mean nothing",
        )


@contextlib.contextmanager
def _as_damage(place: str | Path) -> Iterator[None]:
    """Whatever transformers says about files that are not ours is about the files."""
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise DamagedFile(place, f"transformers cannot load it ({first})") from error
    finally:
        logging.set_verbosity(before)


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of any maker. Nothing is downloaded and no code of the folder is run."""
    with _as_damage(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def open_for_transformers(ref: str | Path) -> tuple[PreTrainedModel, Any]:
    """A model as transformers has it, ours in its class, with a tokenizer of transformers."""
    network, tokenizer = open_model(ref)
    if isinstance(network, ForgeNetwork):
        config = config_dict(network.settings)
        model = ForgeForCausalLM(ForgeConfig(**config)).eval()
        model.network.load_state_dict(network.state_dict())
        return model, open_tokenizer(home_of(ref))
    return network, tokenizer


def end_tokens(folder: Path, model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer, as its maker's `generate` has them."""
    path = folder / "generation_config.json"
    said = files.read_json(path).get("eos_token_id") if path.is_file() else None
    if not path.is_file():
        said = getattr(model.config, "eos_token_id", None)
    ends = said if isinstance(said, list) else [said, tokenizer.eos_token_id]
    known = [end for end in ends if end is not None]
    if not all(isinstance(end, int) for end in known):
        raise DamagedFile(path, f"eos_token_id is {said!r}, a number or a list is needed")
    return frozenset(known)
