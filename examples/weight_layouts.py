"""How Megatron-LM and vLLM keep the weights that Hugging Face's checkpoints have: tables for `axes.LayoutRules`.

    rules = axes.LayoutRules(LLAMA_TO_MEGATRON, g=config.num_key_value_heads, k=config.head_dim)
    rules = axes.LayoutRules(LLAMA_TO_VLLM, h=config.num_attention_heads, g=config.num_key_value_heads)

`h` query heads, `g` key heads with `r` queries each, `k` elements a head; `d` the model's width, `f` an MLP's, `e`
experts. The tables are here and not in the library because the names are other projects', and change with their
versions: copy what you need. `...` is the second dim of a weight, and nothing of a bias.
"""

QKV = tuple(f"model.layers.*.self_attn.{x}_proj.*" for x in "qkv")
GATE_UP = "model.layers.*.mlp.gate_proj.*", "model.layers.*.mlp.up_proj.*"
EXPERTS = "model.layers.*.mlp.experts.{e}.gate_proj.weight", "model.layers.*.mlp.experts.{e}.up_proj.weight"
SHARED = "model.layers.*.mlp.shared_expert.gate_proj.weight?", "model.layers.*.mlp.shared_expert.up_proj.weight?"
MEGATRON_QKV = "decoder.layers.*.self_attention.linear_qkv"

# Megatron-LM with Transformer Engine: for each key head its queries, key and value; a norm belongs to the next matrix.
MEGATRON = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight?": "output_layer.weight",
    "model.layers.*.input_layernorm.weight": f"{MEGATRON_QKV}.layer_norm_weight",
    QKV: (f"{MEGATRON_QKV}.*", "(g r k) ..., (g k) ..., (g k) ... -> (g (r k + k + k)) ..."),
    "model.layers.*.self_attn.o_proj.*": "decoder.layers.*.self_attention.linear_proj.*",
}
LLAMA_TO_MEGATRON = {
    **MEGATRON,
    "model.layers.*.post_attention_layernorm.weight": "decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
    GATE_UP: ("decoder.layers.*.mlp.linear_fc1.*", "f ..., f ... -> (f + f) ..."),
    "model.layers.*.mlp.down_proj.*": "decoder.layers.*.mlp.linear_fc2.*",
}
QWEN_MOE_TO_MEGATRON = {  # Qwen2-MoE and Qwen3-MoE, experts in each layer
    **MEGATRON,
    "model.layers.*.self_attn.q_norm.weight?": "decoder.layers.*.self_attention.q_layernorm.weight",
    "model.layers.*.self_attn.k_norm.weight?": "decoder.layers.*.self_attention.k_layernorm.weight",
    "model.layers.*.post_attention_layernorm.weight": "decoder.layers.*.pre_mlp_layernorm.weight",
    "model.layers.*.mlp.gate.weight": "decoder.layers.*.mlp.router.weight",
    EXPERTS: ("decoder.layers.*.mlp.experts.linear_fc1.weight{e}", "e f d, e f d -> e (f + f) d"),
    "model.layers.*.mlp.experts.{e}.down_proj.weight": "decoder.layers.*.mlp.experts.linear_fc2.weight{e}",
    SHARED: ("decoder.layers.*.mlp.shared_experts.linear_fc1.weight", "f d, f d -> (f + f) d"),
    "model.layers.*.mlp.shared_expert.down_proj.weight?": "decoder.layers.*.mlp.shared_experts.linear_fc2.weight",
    "model.layers.*.mlp.shared_expert_gate.weight?": "decoder.layers.*.mlp.shared_experts.gate_weight",
}

# vLLM: queries, keys and values one behind the other, experts stacked; all other names as they are.
VLLM_QKV = {
    QKV: ("model.layers.*.self_attn.qkv_proj.*", "(h k) ..., (g k) ..., (g k) ... -> (h k + g k + g k) ..."),
}
LLAMA_TO_VLLM = {
    **VLLM_QKV,
    GATE_UP: ("model.layers.*.mlp.gate_up_proj.*", "f ..., f ... -> (f + f) ..."),
}
QWEN_MOE_TO_VLLM = {
    **VLLM_QKV,
    EXPERTS: ("model.layers.*.mlp.experts.w13_weight", "e f d, e f d -> e (f + f) d"),
    "model.layers.*.mlp.experts.{e}.down_proj.weight": "model.layers.*.mlp.experts.w2_weight",
    SHARED: ("model.layers.*.mlp.shared_expert.gate_up_proj.weight", "f d, f d -> (f + f) d"),
}

# transformers 5: a checkpoint has an expert by itself, the model in memory all of them stacked.
QWEN_MOE_TO_MEMORY = {
    EXPERTS: ("model.layers.*.mlp.experts.gate_up_proj", "e f d, e f d -> e (f + f) d"),
    "model.layers.*.mlp.experts.{e}.down_proj.weight": "model.layers.*.mlp.experts.down_proj",
}

TABLES = {  # each with the names whose sizes it needs, in one direction at least
    "llama-megatron": (LLAMA_TO_MEGATRON, "g k"),
    "llama-vllm": (LLAMA_TO_VLLM, "h g"),
    "qwen-moe-megatron": (QWEN_MOE_TO_MEGATRON, "g k"),
    "qwen-moe-vllm": (QWEN_MOE_TO_VLLM, "h g"),
    "qwen-moe-memory": (QWEN_MOE_TO_MEMORY, ""),
}
