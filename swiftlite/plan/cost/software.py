"""Define numbers that describe how efficiently a trainer, such as swiftlite or Megatron-LM, uses a GPU and a layout."""

from dataclasses import dataclass

from swiftlite.args.fields import TransformerImpl
from swiftlite.plan.cost.gpus import Gpu
from swiftlite.plan.cost.timing import PRODUCT_EFFICIENCY
from swiftlite.plan.kernels import HOPPER


@dataclass(frozen=True)
class Software:
    """The efficiency of a trainer's kernels; the default is swiftlite with torch's kernels.

    "Measured" values are from one H200 with torch 2.11, where a step of 8,192 tokens of the 1.7B model with one MTP
    head took 327 ms (docs/en/gpu.md). `tests/plan/test_speed.py` compares the estimate of that step with its parts.

    Attributes:
        products: share of a Hopper GPU's peak that is reached inside a tile of a matrix product. Measured: 768 TFLOP/s
            with matrices of 8,192 x 8,192. Published figures of Blackwell GPUs fit the lower `PRODUCT_EFFICIENCY`.
        attention: share of the GPU's peak that attention reaches, forward and backward, by cuDNN's kernels and
            FlashAttention-3 on Hopper (520 of 989 TFLOP/s; pytorch/pytorch#142132 has 631 in the forward pass), and by
            FlashAttention-2 on an A100. Published.
        flash2: like attention, for FlashAttention-2 on Hopper. Measured: 14 TFLOP in 58 ms.
        layer_bytes: bytes that elementwise kernels of a layer move, forward and backward, per byte of activations that
            autograd stores. A layer of the 1.7B model moves 2.8 bytes (`tests/model/test_kernels.py` counts them). Its
            SwiGLU took 1.4 times as long as its bytes allow (measured); the same is assumed for the other kernels.
        waits: number of times per step that the GPU is idle while the host reads results, with one rank.
            `tests/cuda_emulated` counts them.
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

    products: float = 0.84
    attention: float = 0.53
    flash2: float = 0.24
    layer_bytes: float = 4
    waits: int = 1
    logit_bytes: float = 8
    split_logit_bytes: float = 98
    gradient_bytes: float = 12
    stack_bytes: float = 4
    vocabulary_products: int = 3
    exposed_tp: tuple[float, float] = (2, 1)
    exposed_sends: float = 0.5

    def products_on(self, gpu: Gpu) -> float:
        """Return the share of the peak that is reached inside a tile."""
        return self.products if gpu.capability == HOPPER else PRODUCT_EFFICIENCY

    def attention_on(self, gpu: Gpu, has_flash2: bool) -> float:
        """Return the share of the peak that attention reaches."""
        return self.flash2 if has_flash2 and gpu.capability == HOPPER else self.attention


LOCAL = Software()
_SOFTWARE: dict[TransformerImpl, Software] = {
    "local": LOCAL,
    # Transformer Engine's products accumulate gradients directly, and do not stack the weights of experts.
    "transformer_engine": Software(gradient_bytes=8, stack_bytes=0),
}


def software_of(transformer_impl: TransformerImpl) -> Software:
    """Return the `Software` of swiftlite with linear layers of torch or of Transformer Engine."""
    return _SOFTWARE[transformer_impl]
