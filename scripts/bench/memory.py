"""Compare the memory estimate of `swiftlite doctor --plan` for one rank with the tensors that are really allocated.

Parameters, gradients and optimizer state are the bytes of tensors. Activations are the tensors that autograd saves in
one forward pass (`saved_tensors_hooks`, each storage once). Activations with the size of the vocabulary are counted as
logits; their temporary bfloat16 copy is calculated and not measured. Every token has a label, as the estimate assumes.

    python scripts/bench/memory.py                                                     # on this machine, one process
    python scripts/bench/memory.py --model DIR --micro_batch_size 1 --max_length 512
"""

import argparse
import gc
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.graph import saved_tensors_hooks

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import DistributedArgs, IndexerArgs, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.families import index
from swiftlite.families.reward_model import is_reward_model
from swiftlite.model.build import build_model
from swiftlite.model.gpt import Losses
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.layers.output_norms import OutputNormsLayer
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.plan import run as plan
from swiftlite.plan.cost import memory
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.kernels import Kernels
from swiftlite.plan.trainable import HEADS_ONLY, INDEXERS
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.optim import make_optimizer, wrap_model

SHAPES: dict[str, dict[str, Any]] = {
    "wide": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 2048},
    "deep": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "vocab_size": 2048},
    "large vocabulary": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 32768},
}


@dataclass(frozen=True)
class Measured:
    """Bytes on this rank, named as in `memory.StageMemory`; activations are None with pipeline parallelism."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    logits: int | None
    quantized: int = 0


def measure(hf_config: dict[str, Any], setup: Setup) -> Measured:
    """Measure this rank's memory for a model with random weights, with allocated optimizer state.

    Activations are measured only without pipeline parallelism.
    """
    dtype = torch.bfloat16 if setup.parameter_bytes == 2 else torch.float32
    tied = bool(hf_config.get("tie_word_embeddings"))
    instances = setup.num_distributed_optimizer_instances
    with session(setup.layout, tied_embeddings=tied, num_distributed_optimizer_instances=instances) as mesh:
        device = mesh.device
        family = index.get(hf_config)
        chunks = build_model(
            family.architecture(hf_config),
            hf_config,
            mesh=mesh,
            dtype=dtype,
            heads=setup.heads,
            freeze_trunk=setup.trunk_is_frozen,
            indexer=IndexerArgs(setup.indexer_mode),
            mtp_loss="kl" if setup.heads.draft_vocab else "ce",
            recompute=setup.recompute,
            drafting=family.mtp.drafting,
            kernels=_kernels(setup),
        )
        if setup.mtp_mode == "heads_only":
            HEADS_ONLY.apply(chunks)
        if setup.indexer_mode == "indexer_only":
            INDEXERS.apply(chunks)
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.normal_(std=0.02)
        activations = logits = None
        quantized = 0
        if setup.layout.pipeline_model_parallel_size == 1:
            activations, logits = _kept_by_autograd(chunks[0], hf_config, setup, device.torch_device)
            quantized = _bytes(_copies_of_weights(chunks[0]))
        distributed = DistributedArgs(
            optimizer=setup.optimizer,
            use_distributed_optimizer=setup.use_distributed_optimizer,
            grad_reduce_in_bf16=setup.grad_reduce_in_bf16,
            num_distributed_optimizer_instances=setup.num_distributed_optimizer_instances,
        )
        wrapped = wrap_model(chunks, mesh, dtype, distributed)
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        modules = [module for chunk in chunks for module in chunk.modules()]
        holders = [module for module in modules if isinstance(module, OutputNormsLayer)]
        parameters += [held for module in holders for held in module.buffers(recurse=False)]
        gradients: Any = wrapped  # otherwise `buffers` has the type of torch's method
        buffers = [buffer for chunk in gradients for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        return Measured(
            parameters=sum(parameter.numel() for parameter in parameters),
            weights=_bytes(parameters),
            gradients=_bytes(buffer.grad_data for buffer in buffers),
            optimizer=_optimizer_bytes(setup, wrapped, mesh) if buffers else 0,
            activations=activations,
            logits=logits,
            quantized=quantized,
        )


def _kernels(setup: Setup) -> Kernels:
    has_grouped_experts = setup.is_fused and setup.transformer_impl == "transformer_engine"
    return Kernels(
        setup.transformer_impl,
        is_fused=setup.is_fused,
        has_grouped_experts=has_grouped_experts,
        low_precision=setup.low_precision,
    )


def _copies_of_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the copies of weights that Transformer Engine's linear layers keep between micro-batches."""
    for module in model.modules():
        for copy in getattr(module, "_fp8_workspaces", {}).values():
            yield from (value for value in copy.get_metadata().values() if isinstance(value, torch.Tensor))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _optimizer_bytes(setup: Setup, wrapped, mesh: Mesh) -> int:
    """Return the bytes of AdamW's two moments, and of its float32 weights if the model is not float32."""
    args = SftArgs(
        torch_dtype="bfloat16" if setup.parameter_bytes == 2 else "float32",
        optimizer=setup.optimizer,
        use_distributed_optimizer=setup.use_distributed_optimizer,
        train_iters=2,
        global_batch_size=setup.num_gpus,
    )
    schedule = plan.Schedule(num_samples=2, steps=2, warmup_steps=1)
    optimizer, _ = make_optimizer(args, plan.make_plan(args, setup.num_gpus, Heads()), schedule, wrapped, mesh)
    optimizer.step()
    held: list[torch.Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # no such parameters on this rank
            continue
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                for moment in (state["exp_avg"], state["exp_avg_sq"]):
                    held += _parts(moment)
                if setup.parameter_bytes == 2:
                    held.append(parameter)
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def _parts(moment: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a moment: codes, scales and table of an 8-bit moment, otherwise the moment."""
    return [getattr(moment, name) for name in getattr(moment, "tensor_attrs", ())] or [moment]


def _kept_by_autograd(model, hf_config: dict[str, Any], setup: Setup, device) -> tuple[int, int]:
    """Return the bytes of activations and of logits of one forward pass, which for a reward model computes scores.

    They are the tensors that autograd saves, and the tensors that functions for recomputation hold.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}  # references, so that no address is reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept.setdefault(address, tensor)
        return tensor

    shape = (setup.micro_batch_size, setup.max_length // setup.layout.context_parallel_size)
    tokens_BS = torch.randint(hf_config["vocab_size"], shape, device=device)
    position_ids_BS = torch.arange(shape[1], device=device).expand(shape)
    ahead = [tokens_BS] * setup.heads.drafts
    labels = [tokens_BS.clone() for _ in ahead]
    if model.mtp_loss != "ce":  # the trunk has no prediction after the row
        for depth, labels_BS in enumerate(labels, start=1):
            labels_BS[:, -depth:] = IGNORE_INDEX
    inputs, target = ModelInputs(tokens_BS, position_ids_BS, mtp_input_ids=ahead), Target(tokens_BS, mtp_labels=labels)
    given = (inputs,) if is_reward_model(hf_config) else (inputs, target)
    if tokens_BS.is_cuda:  # compiles kernels, and the compiler keeps tensors
        model(*given)
    before = {id(tensor) for tensor in _tensors_alive()}
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found = model(*given)
    own |= {tensor.untyped_storage().data_ptr() for tensor in _copies_of_weights(model)}
    kept = {address: tensor for address, tensor in kept.items() if address not in own}
    results = {id(found)}
    if isinstance(found, Losses):
        results = {id(tensor) for loss in (found.main, *found.mtp) for tensor in vars(loss).values()}
    # Sequence parallelism gathers into one buffer, which is reused.
    own |= {buffer.untyped_storage().data_ptr() for buffer in parallel_state.get_global_memory_buffer().buffer.values()}
    for tensor in _tensors_alive():
        # Tensors of bytes are states of random generators, whose size does not depend on the model.
        if id(tensor) not in before | results and tensor.dtype is not torch.uint8:
            pack(tensor)
    vocab = (len(setup.heads.draft_vocab) or hf_config["vocab_size"]) // setup.layout.tensor_model_parallel_size

    # A cap keeps logits before they are float32.
    dtypes = {torch.float32} if model.logits_cap is None else {torch.float32, model.config.params_dtype}

    def is_of_loss(tensor: torch.Tensor) -> bool:
        is_matrix = tensor.shape == (model.config.hidden_size, vocab)  # transposed matrix of a draft vocabulary
        is_vector = tensor.numel() == vocab  # one value per token, if there are as many tokens as words
        return tensor.dtype in dtypes and tensor.size(-1) == vocab and not (is_matrix or is_vector)

    of_loss = {address for address, tensor in kept.items() if is_of_loss(tensor)}
    logits = _bytes(kept[address] for address in of_loss)
    passing = 0
    if setup.parameter_bytes < 4 and not is_reward_model(hf_config):
        passing = tokens_BS.numel() * vocab * setup.parameter_bytes
    return _bytes(tensor for address, tensor in kept.items() if address not in of_loss), logits + passing


def _tensors_alive() -> list[torch.Tensor]:
    """Return the tensors that have memory. The compiler's tensors have none."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return [tensor for tensor in tensors if not is_fake(tensor)]


def example(**sizes: int) -> dict[str, Any]:
    """Return a qwen3 config.json with these sizes."""
    return {
        "model_type": "qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    } | sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory with a config.json (default: three small shapes)")
    parser.add_argument("--micro_batch_size", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--mtp_num_layers", type=int, default=1)
    args = parser.parse_args()
    shapes = {name: example(**sizes) for name, sizes in SHAPES.items()}
    if args.model:
        shapes = {str(args.model): json.loads((args.model / "config.json").read_text(encoding="utf-8"))}
    print(f"{'MB (1e6 bytes)':40} {'measured':>10} {'estimated':>10} {'ratio':>7}")
    for name, hf_config in shapes.items():
        for parameter_bytes, recompute in ((2, RecomputeArgs()), (2, RecomputeArgs("full")), (4, RecomputeArgs())):
            # MTP layers only without recomputation; the trunk is sufficient to test recomputation.
            depth = 0
            if recompute.recompute_granularity == "none":
                depth = args.mtp_num_layers
            setup = Setup(
                recompute=recompute,
                micro_batch_size=args.micro_batch_size,
                max_length=args.max_length,
                parameter_bytes=parameter_bytes,
                heads=Heads(depth),
            )
            (estimated,) = memory.estimate(hf_config, setup)
            measured = measure(hf_config, setup)
            dtype = {2: "bfloat16", 4: "float32"}[parameter_bytes]
            print(f"{name}, {dtype}, recompute {recompute.recompute_granularity}, MTP depth {depth}")
            for what in ("weights", "gradients", "optimizer", "activations", "logits"):
                found, expected = getattr(measured, what), getattr(estimated, what)
                print(f"  {what:38} {found / 1e6:10.2f} {expected / 1e6:10.2f} {expected / found:7.3f}")


if __name__ == "__main__":
    main()
