"""Define numbers that describe how efficiently a trainer, such as swiftlite or Megatron-LM, uses a GPU and a layout."""

from dataclasses import dataclass

from swiftlite.args.fields import TransformerImpl


@dataclass(frozen=True)
class Software:
    """The efficiency of a trainer's kernels; the default is swiftlite with torch's kernels.

    Attributes:
        attention: share of the GPU's peak that attention reaches, forward and backward. The value is assumed for
            FlashAttention-2 on Hopper. Newer kernels reach a larger share, as does FlashAttention-2 on an A100.
        logit_bytes: bytes moved per logit by a fused loss outside of matrix products, if the vocabulary is not split.
            In bfloat16, these are 3 reads (maximum and prediction, sum, gradient) and a write of one compiled kernel.
            `tests/model/test_chunked_loss.py` counts them. DPO, KTO and GRPO run the kernel twice and have one more
            matrix product, which is not estimated.
        split_logit_bytes: like logit_bytes, for a vocabulary that is split over tensor-parallel ranks, in float32.
            Counted from the kernels.
        gradient_bytes: bytes moved per weight and micro-batch to accumulate its gradient, which is written and read in
            bfloat16, and added in float32. Counted from the kernels. Without sequence parallelism and
            `overlap_grad_reduce`, the matrix product accumulates directly and moves 8 bytes.
        stack_bytes: bytes moved per weight of experts to stack the weights for one product, once in the forward and
            once in the backward pass. Counted from the kernels.
        vocabulary_products: number of matrix products for the loss, forward and backward; more than 3 if logits are
            recomputed.
        exposed_tp: number of exposed (not overlapped) collectives of half a layer, forward and backward. megatron-core
            overlaps two of the three collectives of the backward pass with matrix products.
        exposed_sends: share of the time of messages between interleaved stages that does not overlap with computation.
            The value is assumed without evidence.
    """

    attention: float = 0.34
    logit_bytes: float = 8
    split_logit_bytes: float = 98
    gradient_bytes: float = 12
    stack_bytes: float = 4
    vocabulary_products: int = 3
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
