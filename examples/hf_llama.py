"""`LlamaForCausalLM` of transformers, its code untouched, on any `dp tp`: gradients, and generation with a KV cache.

    python examples/hf_llama.py --mesh "dp=2 tp=2"              # four local processes, compared with one device
    python examples/hf_llama.py --mesh "dp tp=4" --key-heads 2  # fewer key heads than ranks: each on two of them
    python examples/hf_llama.py --words 257 --batch 5           # neither the vocabulary nor the batch divides

`SPECS` says what `tp` splits of the parameters, and the whole model is one region: its forward sees this rank's
tensors, and computes with this rank's heads because the weights have no others. Three things are said beside it: two
products of a layer have summands of their result, which a hook adds up; the rows of tokens are looked up where they
are; an attention counts its own heads. Tried with transformers 5.23; another version may have other names.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support import flag, largest, read_options, shown, too_many, verdict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import axes

SPECS = {
    "*.embed_tokens.weight": "v@tp d",
    "lm_head.weight": "v@tp d",  # the same tensor, where they are tied
    "*.q_proj.weight": "(h@tp k) d",
    "*.[kv]_proj.weight": "(g@kv k) d",  # kv is tp, or the part of it that there are key heads for
    "*.o_proj.weight": "d (h@tp k)",
    "*.gate_proj.weight": "f@tp d",
    "*.up_proj.weight": "f@tp d",
    "*.down_proj.weight": "d f@tp",
    "*": "...",  # norms: whole on every rank of tp
}


def on_mesh(model: LlamaForCausalLM, mesh: axes.Mesh, expression: str = "", **specs: str) -> LlamaForCausalLM:
    """The model itself, sharded in place, a region of this expression; from tokens to logits, where it isn't said.

    `specs` are those of arguments that may be absent.
    """
    config = model.config
    h, g = config.num_attention_heads, config.num_key_value_heads
    rows = model.get_input_embeddings()
    model.set_input_embeddings(axes.nn.Embedding.from_module(rows, "b s, v@tp d -> b s d"))  # tied, where they are
    axes.shard_module(model, SPECS, mesh, h=h, g=g, k=config.head_dim)
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = (h // mesh.names["tp"]) // (g // mesh.names["kv"])
        for product in (layer.self_attn.o_proj, layer.mlp.down_proj):
            product.register_forward_hook(lambda module, _, y: axes.psum(y, "tp"))
    return axes.shard_map(model, expression or f"b@dp s -> b@dp t v={config.vocab_size}@tp", mesh, **specs)


def mesh_of(options: Options) -> axes.Mesh:
    """`dp` and `tp`, which is `kv` and `rep`: the ranks that have other key heads, and those that have the same."""
    kv = min(options.key_heads, axes.Mesh(options.mesh).names["tp"])
    return axes.init_mesh(options.mesh, "(tp) = kv rep", kv=kv, device_type="cpu")["dp", "kv", "rep"]


def plain(options: Options) -> LlamaForCausalLM:
    """The model of transformers, the same on every rank."""
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=options.words,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=options.key_heads,
        tie_word_embeddings=bool(options.tied),
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()


# ----------------------------------------------------------------------------- values and gradients


def distances(options: Options) -> dict[str, float]:
    """How far logits, loss and gradients of all parameters are from one device's; of gradients by their largest."""
    mesh, one = mesh_of(options), plain(options)
    many = on_mesh(copy.deepcopy(one), mesh)
    tokens = torch.randint(one.config.vocab_size, (options.batch, 17))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    wanted = one(inputs, use_cache=False).logits
    expected = F.cross_entropy(wanted.flatten(0, 1), labels.flatten())
    expected.backward()
    with mesh:
        logits = many(axes.shard(inputs, "b@dp s"), use_cache=False).logits
        loss = axes.cross_entropy(logits, axes.shard(labels, "b@dp s"), "b@dp s v@tp, b@dp s -> ")
        loss.backward()
    found = {"logits": (logits, wanted), "loss": (loss, expected)}
    pairs = zip(many.named_parameters(), one.parameters(), strict=True)
    found |= {name: (p.grad, q.grad) for (name, p), q in pairs}
    with torch.no_grad():
        return {name: float((axes.unshard(x) - y).abs().max() / y.abs().max()) for name, (x, y) in found.items()}


# ----------------------------------------------------------------------------------------- generation


def greedy(model: nn.Module, prompt: Tensor, tokens: int, whole: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Most likely tokens, `b 1` each, of a model with its cache. `whole`: logits of all words from this rank's."""
    cache, ids = DynamicCache(config=model.config), prompt
    for _ in range(tokens):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = whole(logits[:, -1]).argmax(-1, keepdim=True)
        yield ids


class RowsByHand(nn.Module):
    """The embedding of this rank's words, summed over ranks."""

    def __init__(self, weight: nn.Parameter, words: int, group: dist.ProcessGroup):
        super().__init__()
        self.weight, self.group, self.first = weight, group, dist.get_rank(group) * -(-words // group.size())

    def forward(self, ids: Tensor) -> Tensor:
        here = ids - self.first
        other = (here < 0) | (here >= len(self.weight))
        x = F.embedding(here.masked_fill(other, 0), self.weight).masked_fill(other[..., None], 0.0)
        dist.all_reduce(x, group=self.group)
        return x


def by_hand(one: LlamaForCausalLM, many: nn.Module, group: dist.ProcessGroup) -> LlamaForCausalLM:
    """The same on plain parameters, `many`'s shards, with torch's own collectives."""
    shards = {name: nn.Parameter(axes.to_local(p)) for name, p in many.named_parameters(remove_duplicate=False)}
    for name in shards:
        path, _, own = name.rpartition(".")
        setattr(one.get_submodule(path), own, shards[name])
    one.set_input_embeddings(RowsByHand(shards["model.embed_tokens.weight"], one.config.vocab_size, group))

    def summed(module: nn.Module, _: object, y: Tensor) -> Tensor:
        dist.all_reduce(y, group=group)
        return y

    for layer, other in zip(one.model.layers, many.model.layers, strict=True):
        layer.self_attn.num_key_value_groups = other.self_attn.num_key_value_groups
        layer.self_attn.o_proj.register_forward_hook(summed)
        layer.mlp.down_proj.register_forward_hook(summed)
    return one


@torch.no_grad()
def generate(options: Options) -> tuple[list[bool], dict[str, list[float]]]:
    """Whether both ways give one device's tokens in every round; and the seconds of each token, the two in turns."""
    mesh, one = mesh_of(options), plain(options)
    many = on_mesh(copy.deepcopy(one), mesh)
    group = mesh.axis("tp").group
    hand = by_hand(copy.deepcopy(one), many, group)
    prompt = torch.randint(one.config.vocab_size, (options.batch, 8))
    rows = mesh.sharding("b@dp s").local_indices(tuple(prompt.shape))

    def gathered(logits: Tensor) -> Tensor:
        most = -(-options.words // group.size())
        mine = F.pad(logits, (0, most - logits.shape[-1]))
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts, -1)[:, : options.words]

    def rearranged(logits: Tensor) -> Tensor:
        return axes.rearrange(logits, "b v@tp -> b v", mesh=mesh, v=options.words)

    wanted = torch.cat(list(greedy(one, prompt[rows], options.tokens, lambda logits: logits)), 1)
    right, seconds = [], {"by hand": [], "axes": []}
    for turn in range(options.rounds):
        loops = {
            "by hand": greedy(hand, prompt[rows], options.tokens, gathered),
            "axes": greedy(many, prompt[rows], options.tokens, rearranged),
        }
        found = {name: [] for name in loops}
        for token in range(options.tokens):
            for name in list(loops)[:: 1 if (turn + token) % 2 else -1]:
                dist.barrier(group)
                started = time.perf_counter()
                found[name].append(next(loops[name]))
                seconds[name].append(time.perf_counter() - started)
        right += [torch.equal(torch.cat(each, 1), wanted) for each in found.values()]
    return right, seconds


def work(options: Options) -> tuple[dict[str, float], list[bool], dict[str, list[float]]]:
    """What each rank does."""
    torch.set_num_threads(1)
    return distances(options), *generate(options)


# ------------------------------------------------------------------------------------ command line


@dataclass(frozen=True)
class Options:
    """A Llama of transformers on a mesh, compared with one device; and the time that a token takes."""

    mesh: str = flag("dp=2 tp=2", "the axes dp and tp with their sizes")
    key_heads: int = flag(4, "heads of keys and values, of 8 heads of queries")
    tied: int = flag(1, "1: the embedding's weight is the head's", least=0)
    dtype: str = flag("float32", "of the model", choices=["float32", "float64"])
    batch: int = flag(4, "samples, over all ranks")
    words: int = flag(256, "in the vocabulary")
    tokens: int = flag(24, "tokens to generate")
    rounds: int = flag(6, "how often to generate them; the first is left out of the times")
    seed: int = flag(0, "of the weights and the samples", least=0)


def what_is_wrong(options: Options) -> str | None:
    """What can't be, as far as one process can tell."""
    try:
        mesh = axes.Mesh(options.mesh)
    except axes.AxesError as error:
        return f"--mesh {error}"
    if set(mesh.axis_names) != {"dp", "tp"}:
        return f"--mesh has the axes dp and tp; found {options.mesh!r}"
    tp, g = mesh.names["tp"], options.key_heads
    if 8 % tp or 8 % g:
        return f"--mesh {options.mesh}: tp and --key-heads {g} divide 8 heads, of which ranks share whole ones"
    return too_many(mesh.size)


def main(arguments: list[str] | None = None) -> int:
    options = read_options("hf_llama.py", Options, what_is_wrong, arguments)
    found = axes.launch(work, axes.Mesh(options.mesh).size, options)
    far, right, seconds = largest(far for far, _, _ in found), all(all(right) for _, right, _ in found), found[0][2]
    worst = {"logits": far["logits"], "loss": far["loss"], "gradients": max(list(far.values())[2:])}
    print(f"{options.mesh}, {options.dtype}, against one device: {shown(worst)}")
    print(f"{options.tokens} tokens of {options.batch} samples, the same as one device's: {right}")
    middle = {name: statistics.median(each[options.tokens :] or each) for name, each in seconds.items()}
    for name, each in seconds.items():
        print(f"  {name:<8}  first call {each[0] * 1e3:6.1f} ms, then {middle[name] * 1e3:6.2f} ms a token (median)")
    print(f"  ratio     {middle['axes'] / middle['by hand']:.2f}")
    return verdict("hf_llama.py", far.values(), 1e-5) if right else 1


if __name__ == "__main__":
    sys.exit(main())
