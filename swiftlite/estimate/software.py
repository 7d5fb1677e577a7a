"""Define numbers that describe the efficiency of trainers, such as swiftlite or Megatron-LM, on the same GPU and
layout."""

from dataclasses import dataclass

from swiftlite.args.fields import TransformerImpl


@dataclass(frozen=True)
class Software:
    """The efficiency of a trainer's kernels; the default is swiftlite with torch's kernels.

    Attributes:
        attention: share of the peak that attention reaches, forward and backward. Assumed for FlashAttention-2 on
            Hopper; newer kernels reach a larger share, and so does FlashAttention-2 on an A100.
        logit_bytes: bytes moved per logit of a fused loss in addition to its matrix products, if the vocabulary is not
            split. In bfloat16, these are 4 reads and a write in the forward pass (maximum, sum and gradient in one
            compiled kernel, prediction), and 3 reads and a write in the backward pass. Counted
            (`tests/model/test_chunked_loss.py`).
        split_logit_bytes: like logit_bytes, for a vocabulary split over tensor-parallel ranks, in float32. Counted.
        gradient_bytes: bytes moved per weight and micro-batch to accumulate its gradient, which is written and read in
            bfloat16, and added in float32. Counted. Without sequence parallelism and `overlap_grad_reduce`, the product
            accumulates directly and moves 8 bytes.
        stack_bytes: bytes moved per weight of experts to stack weights for one product, once in the forward and once in
            the backward pass. Counted.
        vocabulary_products: number of matrix products for the loss, forward and backward; a chunked loss recomputes
            logits (`model/loss/chunked_loss.py`).
        exposed_tp: number of exposed (not overlapped) collectives of half a layer, forward and backward. megatron-core
            overlaps two of the three collectives of the backward pass with products. Counted.
        exposed_sends: exposed share of the messages between interleaved stages, which are sent during computation.
            Assumed without evidence.
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
    # Transformer Engine's products accumulate gradients directly, and do not stack the weights of experts.
    "transformer_engine": Software(gradient_bytes=8, stack_bytes=0),
}


def software_of(transformer_impl: TransformerImpl) -> Software:
    """Return the `Software` of swiftlite with linear layers of torch or of Transformer Engine."""
    return _SOFTWARE[transformer_impl]
