"""Hugging Face interop: our network as a model of transformers.

Importing it registers our network with the Auto classes: `AutoModelForCausalLM.from_pretrained`
opens a directory of ours. `generate` of transformers recomputes the text for every token.
"""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from agent_forge.config.load import validate
from agent_forge.config.settings import ModelSettings
from agent_forge.data.loader import IGNORE
from agent_forge.model.folder import MODEL_TYPE
from agent_forge.model.network import ForgeNetwork


class ForgeConfig(transformers.PretrainedConfig):  # type: ignore[misc]
    """The shape of a network in the form that transformers keeps in config.json."""

    model_type = MODEL_TYPE

    def __init__(self, **values: Any) -> None:
        shape = {name: values.pop(name) for name in ModelSettings.model_fields if name in values}
        self.shape = validate(ModelSettings, shape, "config.json").model_dump()
        values = {"tie_word_embeddings": True, "use_cache": False, **values}
        values.pop("shape", None)
        super().__init__(**values)
        for name, value in self.shape.items():
            setattr(self, name, value)
        self.hidden_size, self.num_hidden_layers = self.d_model, self.n_layers
        self.num_attention_heads = self.n_heads

    def settings(self) -> ModelSettings:
        shape = {name: getattr(self, name) for name in ModelSettings.model_fields}
        return ModelSettings.model_validate(shape)


class ForgeForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[misc]
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
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Any = None, **_: Any
    ) -> CausalLMOutput:
        """Logits of every position; with labels also the mean loss of predicting the next token."""
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            # As batches to generate from come: rows begin at their first token, as if alone.
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            before = attention_mask.long().argmax(1, keepdim=True)
            moved = input_ids.gather(1, (places + before).clamp(max=len(places) - 1))
            back = (places - before).clamp(min=0)[..., None]
            logits = torch.take_along_dim(self.network(moved), back, dim=1)
        else:
            logits = self.network(input_ids)
        loss = None
        if labels is not None:
            predicted, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = F.cross_entropy(predicted, wanted, ignore_index=IGNORE)
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def config_dict(settings: ModelSettings) -> dict[str, Any]:
    """config.json of a model directory that holds a network of this shape."""
    shape = settings.model_dump(mode="json")
    if not settings.head_size:  # as it was before heads could be pruned
        del shape["head_size"]
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ForgeForCausalLM.__name__],
        "tie_word_embeddings": True,
        "use_cache": False,
        "dtype": "float32",
        **shape,
    }


def config_of(network: Any) -> dict[str, Any]:
    """The config.json of a network of ours that is not packed; nothing of others."""
    ours = isinstance(network, ForgeNetwork)
    return config_dict(network.settings) if ours else {}


def build_network(config: dict[str, Any]) -> ForgeNetwork:
    """The network of a config.json, without weights."""
    shape = {name: config[name] for name in ModelSettings.model_fields if name in config}
    return ForgeNetwork(validate(ModelSettings, shape, "config.json"))


transformers.AutoConfig.register(MODEL_TYPE, ForgeConfig)
transformers.AutoModelForCausalLM.register(ForgeConfig, ForgeForCausalLM)
