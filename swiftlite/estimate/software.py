"""Describe differences between trainers on the same GPU and layout as numbers."""

from dataclasses import dataclass

from swiftlite.args.fields import TransformerImpl


@dataclass(frozen=True)
class Software:
    """The efficiency of a trainer's kernels; the default is swiftlite's own over torch.

    Attributes:
        attention: share of the peak that attention reaches, forward and backward. Assumed, for FlashAttention-2 on
            Hopper; newer kernels reach more, and so does this one on an A100.
        logit_bytes: bytes moved per logit of a fused loss in addition to its products, for an unsplit vocabulary: 4
            reads and a write of bfloat16 forward (maximum, sum and gradient in one compiled kernel, prediction), 3
            reads and a write backward. Counted (`tests/model/test_chunked_loss.py`).
        split_logit_bytes: the same for a vocabulary split over tensor-parallel ranks, in float32. Counted.
        gradient_bytes: bytes moved per weight and micro-batch to accumulate its gradient: written and read in
            bfloat16, added in float32. Counted. Without sequence parallelism and `overlap_grad_reduce` the product
            accumulates directly, which moves 8.
        stack_bytes: bytes moved per weight of experts to stack them for one product, forward and again backward.
            Counted.
        vocabulary_products: products of the loss; a chunked loss recomputes logits (`model/loss/chunked_loss.py`).
        exposed_tp: exposed collectives of a half layer, forward and backward. megatron-core overlaps two of the
            three backward ones with products. Counted.
        exposed_sends: exposed share of the messages between interleaved stages, which are sent during computation.
            A guess.
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
    # Its products accumulate gradients directly and do not stack the weights of experts.
    "transformer_engine": Software(gradient_bytes=8, stack_bytes=0),
}


def software_of(transformer_impl: TransformerImpl) -> Software:
    """Return swiftlite's own software, with linear layers of torch or of Transformer Engine."""
    return _SOFTWARE[transformer_impl]
