"""What makes one trainer faster than another on the same GPU and layout, as numbers."""

from dataclasses import dataclass

from swiftlite.args.fields import TransformerImpl


@dataclass(frozen=True)
class Software:
    """What a trainer's kernels are like; by default swiftlite's own over torch.

    Attributes:
        attention: part of the peak that attention gets, forward and backward. Assumed, for FlashAttention-2 on Hopper;
            newer kernels get more, and so does this one on an A100.
        logit_bytes: moved for each logit of a fused loss next to its products, where the vocabulary is whole: 4 reads
            and a write of bfloat16 forward (largest, sum and gradient in one compiled kernel, prediction), 3 reads and
            a write backward. Counted (`tests/model/test_chunked_loss.py`).
        split_logit_bytes: the same for a vocabulary that tensor-parallel ranks share, pass by pass in float32. Counted.
        gradient_bytes: moved by a micro-batch for each weight, to add to its gradient: written and read in bfloat16,
            added in float32. Counted. Without sequence parallelism and `overlap_grad_reduce` the product adds by
            itself, which takes 8.
        stack_bytes: moved for each weight of experts to stack them for one product, forward and again backward.
            Counted.
        vocabulary_products: of the loss; in chunks the logits are made a second time (`model/loss/chunked_loss.py`).
        exposed_tp: collectives of a half layer that nothing hides, forward and backward. megatron-core hides two of
            the three backward behind products. Counted.
        exposed_sends: part of the messages between interleaved stages that nothing hides. They are sent while others
            compute; how many come too late is a guess.
    """

    attention: float = 0.34
    logit_bytes: float = 18
    split_logit_bytes: float = 98
    gradient_bytes: float = 12
    stack_bytes: float = 4
    vocabulary_products: int = 4
    exposed_tp: tuple[float, float] = (2, 1)
    exposed_sends: float = 0.5


_SOFTWARE: dict[TransformerImpl, Software] = {
    "local": Software(),
    # Its products add to the gradient themselves, and take weights of experts where they are.
    "transformer_engine": Software(gradient_bytes=8, stack_bytes=0),
}


def software_of(transformer_impl: TransformerImpl) -> Software:
    """swiftlite's own, with linear layers of torch or of Transformer Engine."""
    return _SOFTWARE[transformer_impl]
