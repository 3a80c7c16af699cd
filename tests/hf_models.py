"""Four models of transformers on a mesh of `dp` and `tp`, their code untouched: Qwen3, Gemma 3, Mixtral and BERT.

Each says what `tp` splits of its parameters. The whole model is one region, so that its forward has this rank's heads,
words, and columns of experts. `on_mesh` says the rest: which results are summands, how tokens are looked up, and what
else FSDP2 splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import axes

WORDS = {"*.embed_tokens.weight": "v@tp d", "lm_head.weight": "v@tp d"}  # one tensor, where they are tied
ATTENTION = {"*.q_proj.weight": "(h@tp k) d", "*.[kv]_proj.weight": "(g@tp k) d", "*.o_proj.weight": "d (h@tp k)"}
MLP = {"*.gate_proj.weight": "f@tp d", "*.up_proj.weight": "f@tp d", "*.down_proj.weight": "d f@tp"}
EXPERTS = {"*.experts.gate_up_proj": "e (two=2 f@tp) d", "*.experts.down_proj": "e d f@tp"}
OTHERS = {"*": "..."}  # norms, routers, biases of sums: whole on every rank of tp

QWEN3 = WORDS | ATTENTION | MLP | OTHERS
GEMMA3 = QWEN3 | {"*.[kv]_proj.weight": "..."}  # one head of keys, for all ranks
MIXTRAL = WORDS | ATTENTION | EXPERTS | OTHERS
BERT = {
    "*.word_embeddings.weight": "v@tp d",
    "cls.predictions.decoder.weight": "v@tp d",
    "cls.predictions.bias": "v@tp",
    "*.self.*.weight": "(h@tp k) d",
    "*.self.*.bias": "(h@tp k)",
    "*.attention.output.dense.weight": "d (h@tp k)",
    "*.intermediate.dense.weight": "f@tp d",
    "*.intermediate.dense.bias": "f@tp",
    "*.layer.*.output.dense.weight": "d f@tp",
    **OTHERS,
}

SMALL = {"vocab_size": 257, "num_hidden_layers": 2, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "pad_token_id": 0}


def qwen3() -> PreTrainedModel:
    config = Qwen3Config(**SMALL, **HEADS, hidden_size=27, intermediate_size=37, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config)


def gemma3() -> PreTrainedModel:
    heads = HEADS | {"num_key_value_heads": 1, "query_pre_attn_scalar": 6}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, **heads, **layers, hidden_size=40, intermediate_size=37, final_logit_softcapping=3.0)
    )


def mixtral() -> PreTrainedModel:
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return MixtralForCausalLM(MixtralConfig(**SMALL, **HEADS, **experts, hidden_size=27, intermediate_size=36))


def bert() -> PreTrainedModel:
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # torch's dropout draws by rank
    return BertForMaskedLM(BertConfig(**SMALL, **off, num_attention_heads=8, hidden_size=40, intermediate_size=37))


@dataclass(frozen=True)
class Model:
    """A model of one device, and how it lies.

    specs: what tp splits. layers: where the layers are. summands: the modules of a layer whose results are summands.
    """

    make: Callable[[], PreTrainedModel]
    specs: Mapping[str, str]
    layers: str = "model.layers"
    summands: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")


MODELS = {
    "Qwen3": Model(qwen3, QWEN3),
    "Gemma 3": Model(gemma3, GEMMA3),
    "Mixtral": Model(mixtral, MIXTRAL, summands=("self_attn.o_proj", "mlp.experts")),
    "BERT": Model(bert, BERT, "bert.encoder.layer", ("attention.output.dense", "output.dense")),
}


def on_mesh(
    which: Model, model: PreTrainedModel, mesh: axes.Mesh, recompute: str, of_mesh: bool = False
) -> PreTrainedModel:
    """The model, sharded in place over tp, and by FSDP2 over dp.

    recompute: whose checkpoints recompute the activations of a layer. of_mesh: whether parameters lie on dp as well,
    and FSDP2 is told that this axis of theirs is its own.
    """
    config, layers = model.config, model.get_submodule(which.layers)
    model.set_input_embeddings(rows_of(model.get_input_embeddings()))
    for layer in layers:
        for name in which.summands:
            layer.get_submodule(name).register_forward_hook(summed)
        if which.specs is GEMMA3:
            layer.self_attn.num_key_value_groups //= mesh.names["tp"]
    k = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    axes.shard_module(model, which.specs, mesh if of_mesh else mesh["tp"], k=k)
    types = {"token_type_ids": "b@dp s"} if which.specs is BERT else {}
    axes.shard_map(model, "b@dp s ->", mesh, results={"logits": "b@dp s v@tp"}, attention_mask="b@dp s", **types)
    if recompute == "transformers":
        model.activation_checkpointing_enable()
    if recompute == "torchtitan":
        for name, layer in layers.named_children():
            layers.register_module(name, checkpoint_wrapper(layer))
    how = over_dp_of(mesh) if of_mesh else {"mesh": mesh["dp"].device_mesh}
    for module in (*layers, model):
        fully_shard(module, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a gradient is a summand of the whole one
    return model


def summed(module: nn.Module, _: object, y: Tensor) -> Tensor:
    """A forward hook: the sum of what the ranks of tp have. Each has the whole bias, which counts once."""
    bias = getattr(module, "bias", None)
    return axes.psum(y, "tp") if bias is None else axes.psum(y - bias, "tp") + bias


def rows_of(old: nn.Embedding) -> nn.Module:
    """An embedding whose words tp splits. transformers has one of its own for Gemma, which scales what it looks up."""
    if type(old) is nn.Embedding:
        return axes.nn.Embedding.from_module(old, "b s, v@tp d -> b s d")
    sizes, scale = {"v": old.num_embeddings, "d": old.embedding_dim}, old.embed_scale.item()
    rows = axes.nn.Embedding("b s, v@tp d -> b s d", padding_idx=old.padding_idx, device="meta", **sizes)
    rows.weight = old.weight
    rows.register_forward_hook(lambda module, _, y: y * scale)
    return rows


def over_dp_of(mesh: axes.Mesh) -> dict[str, object]:
    from torch.distributed.fsdp import DataParallelMeshDims  # torch 2.13

    return {"mesh": mesh.device_mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
