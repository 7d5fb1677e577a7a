"""Rotary embeddings with the frequencies of transformers, for every `rope_type` that transformers supports.

Shapes: S tokens of a row, B batch, N heads, D channels of a head, of which R are rotary.

Models that take images have positions along three axes (M-RoPE): time, row and column. Each of the R / 2 angles depends
on the position along one axis. If all three positions are equal, this is the usual rotary embedding.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from swiftlite.base.errors import UserError
from swiftlite.families.rope import ROPE_KEYS
from swiftlite.model.layers.compiled import compiled
from swiftlite.runtime.device import on_device

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of rotary embedding with frequencies that depend on the length of the sequence."""


def rope_config(hf_config: dict[str, Any]) -> LlamaConfig:
    """Return the settings of rotary embeddings in a config.json, normalized by transformers.

    Legacy `rope_scaling` is supported.
    """
    with _refusing():
        values = {key: hf_config[key] for key in ROPE_KEYS if hf_config.get(key) is not None}
        if values.get("head_dim"):  # LlamaConfig requires that heads divide the hidden size
            values["hidden_size"] = values["head_dim"] * values["num_attention_heads"]
        for key in ("rope_parameters", "rope_scaling"):
            if key in values:
                values[key] = _without_axes(values[key])
        return LlamaConfig.from_dict(values)


def _without_axes(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings without those for positions along three axes, which do not change the frequencies."""
    kept = {key: value for key, value in stated.items() if not key.startswith("mrope_")}
    for key in ("rope_type", "type"):
        if kept.get(key) == "mrope":  # of Qwen2-VL and Qwen2.5-VL: sections of the default type
            kept[key] = "default"
    return kept


@contextmanager
def _refusing() -> Iterator[None]:
    """Convert exceptions of transformers for unexpected values to a UserError."""
    try:
        yield
    except Exception as error:
        problem = " ".join(str(error).split())
        raise UserError(f"config.json: invalid rotary parameters: {problem}", _HINT) from error


_HINT = "copy rope_parameters (or rope_scaling, rope_theta) from the model's source"


class RotaryEmbedding:
    """Cosines and sines of rotary embeddings, computed once for all layers with transformers' frequencies.

    megatron-core computes cosines and sines in every layer, separately for queries and keys, with its own frequencies.

    Args:
        hf_config: the model's config.json, or only its keys about rotary frequencies.
        device: device of the result.
        dtype: dtype of the result; computed in float32.
        in_pairs: whether the result is for `rotate_pairs`; otherwise for `rotate`.

    Raises:
        UserError: transformers does not support the `rope_type`.
    """

    def __init__(self, hf_config: dict[str, Any], device: torch.device, dtype: torch.dtype, in_pairs: bool = False):
        self.hf = rope_config(hf_config)
        self.in_pairs = in_pairs
        self.device = device
        self.dtype = dtype
        assert self.hf.rope_parameters
        self.rope_type = str(self.hf.rope_parameters["rope_type"])
        if self.rope_type != "default" and self.rope_type not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
            raise UserError(f"config.json: unknown rope_type {self.rope_type!r}", f"transformers supports {known}")
        with _refusing():
            frequencies, scaling = self._frequencies(length=None)
        # Here, because otherwise the first sign of a bad config.json would be a loss that is not a number.
        if not frequencies.isfinite().all() or not math.isfinite(scaling):
            raise UserError("config.json: its rotary frequencies are not finite", _HINT)
        self._stated = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on the length of the sequence."""
        return self.rope_type in LENGTH_DEPENDENT

    def restarts_at(self, length: int) -> bool:
        """Return whether decoding computes a row again when it reaches this length, because all frequencies change.

        This is the length at which `longrope` changes to the long factors: transformers discards the cache of Phi-3
        there (`prepare_inputs_for_generation` of modeling_phi3.py in 5.19). With `dynamic`, whose frequencies change
        with every token, cached keys keep theirs, as in transformers.
        """
        if self.rope_type != "longrope":
            return False
        assert self.hf.rope_parameters
        return length - 1 == self.hf.rope_parameters["original_max_position_embeddings"]

    def __call__(self, lengths: Sequence[int], offset: int = 0, unpadded: Sequence[int] = ()) -> torch.Tensor:
        """Return cosines and sines [2, S, 1, 1, R] for `rotate`, for a row of sequences with the given lengths.

        Args:
            offset: position of each sequence's first token.
            unpadded: lengths that determine the frequencies of the first sequences; default: `lengths`.
        """
        if self.depends_on_length:
            pairs = zip_longest(lengths, unpadded)
            return torch.cat([self._rotary_emb(length, offset, of or length) for length, of in pairs], dim=1)
        longest = self._rotary_emb(max(lengths), offset)
        return torch.cat([longest[:, :length] for length in lengths], dim=1)

    def _rotary_emb(self, length: int, offset: int, unpadded: int | None = None) -> torch.Tensor:
        """Compute cosines and sines [2, length, 1, 1, R] for one sequence."""
        frequencies, scaling = self._frequencies(unpadded)
        positions = torch.arange(offset, offset + length, dtype=torch.float32, device=self.device)
        angles = torch.outer(positions, on_device(frequencies, self.device))
        return self._axis_angles(angles, scaling)[:, :, None, None]

    def at(self, axes_3BS: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines [2, S, B, 1, R] for `rotate`, for tokens with int64 positions along three axes.

        Raises:
            UserError: config.json does not assign channels to axes, or frequencies depend on the length of the
                sequence.
        """
        if self.rope_type in LENGTH_DEPENDENT:
            problem = f"config.json: rope_type {self.rope_type!r} is not supported with positions along three axes"
            raise UserError(problem, _HINT)
        frequencies, scaling = self._frequencies(length=None)
        axis_of_angle = on_device(_axis_of_angle(self._stated, len(frequencies)), self.device)
        # From [3, B, S]: for each angle, the positions along its axis.
        positions_SBA = axes_3BS.float()[axis_of_angle].movedim(0, -1).transpose(0, 1)  # A angles: R / 2
        angles = positions_SBA * on_device(frequencies, self.device)
        return self._axis_angles(angles, scaling)[:, :, :, None]

    def _axis_angles(self, angles: torch.Tensor, scaling: float) -> torch.Tensor:
        """Return cosines and signed sines, stacked [2, ..., R], of angles [..., R / 2]."""
        cosine = angles.cos() * scaling
        sine = angles.sin() * scaling
        turns = torch.stack([torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)])
        if self.in_pairs:
            turns = turns.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)
        return turns.to(self.dtype)

    def _frequencies(self, length: int | None) -> tuple[torch.Tensor, float]:
        """Return angles per position [R / 2], and the factor on cosines and sines, which is 1 for most types.

        Args:
            length: length of the sequence, read only for the types in `LENGTH_DEPENDENT`; None for other types.
        """
        if self.rope_type == "default":
            # Llama's formula for a part of each head (partial_rotary_factor), which LlamaRotaryEmbedding does not
            # support.
            return Glm4MoeRotaryEmbedding.compute_default_rope_parameters(self.hf)  # type: ignore[arg-type]
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.hf, device=torch.device("cpu"), seq_len=length)


class RotaryEmbeddings:
    """The rotary embeddings of a model whose layers have different ones, concatenated along the rotary channels.

    Args:
        hf_configs: for each rotary embedding its settings, with the keys of config.json.
        device, dtype: as for `RotaryEmbedding`.

    Raises:
        UserError: transformers does not support a `rope_type`.
    """

    def __init__(self, hf_configs: Sequence[Mapping[str, Any]], device: torch.device, dtype: torch.dtype):
        self._parts = [RotaryEmbedding(dict(hf_config), device, dtype) for hf_config in hf_configs]

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies of a part depend on the length of the sequence."""
        return any(part.depends_on_length for part in self._parts)

    def restarts_at(self, length: int) -> bool:
        """Return whether a part restarts (`RotaryEmbedding.restarts_at`)."""
        return any(part.restarts_at(length) for part in self._parts)

    def __call__(self, lengths: Sequence[int], offset: int = 0, unpadded: Sequence[int] = ()) -> torch.Tensor:
        """Return [2, S, 1, 1, K * R], as `RotaryEmbedding` does, for K rotary embeddings."""
        return torch.cat([part(lengths, offset, unpadded) for part in self._parts], dim=-1)

    def at(self, axes_3BS: torch.Tensor) -> torch.Tensor:
        """Return [2, S, B, 1, K * R], as `RotaryEmbedding.at` does, for K rotary embeddings."""
        return torch.cat([part.at(axes_3BS) for part in self._parts], dim=-1)


def _axis_of_angle(stated: Mapping[str, Any], num_angles: int) -> torch.Tensor:
    """Return the axis (0, 1 or 2) that each angle belongs to, int64. The axes form consecutive sections or are
    interleaved.

    For example, sections 4, 2, 2 give the axes 0 0 0 0 1 1 2 2 if consecutive, and 0 1 2 0 1 2 0 0 if interleaved.

    Args:
        stated: rope_parameters of config.json.

    Raises:
        UserError: mrope_section does not consist of three numbers with the right sum.
    """
    sections = stated.get("mrope_section")
    if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != num_angles:
        problem = f"config.json: mrope_section {sections!r} is not three numbers with the sum {num_angles}"
        raise UserError(problem, _HINT)
    if not stated.get("mrope_interleaved"):
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axis = torch.zeros(num_angles, dtype=torch.int64)
    for number in (1, 2):
        axis[number : 3 * sections[number] : 3] = number
    return axis


def rotate(channels: torch.Tensor, rotary_emb: torch.Tensor) -> torch.Tensor:
    """Rotate the first R channels of heads: channel i together with channel i + R / 2. Other channels are unchanged.

    For the two halves x and y of these channels, and the cosines c and sines s of their angles:

        x' = x * c + y * -s
        y' = y * c + x * s

    Args:
        channels: [S, B, N, D].
        rotary_emb: [2, S, 1, 1, R] or [2, S, B, 1, R]: the concatenations (c, c) and (-s, s).
    """
    cosine, sine = rotary_emb
    num_rotary = rotary_emb.size(-1)
    rest = channels[..., num_rotary:]
    if rest.size(-1):
        channels = channels[..., :num_rotary]
    # By half of the channels: i and i + R / 2 change places.
    swapped = channels.roll(num_rotary // 2, dims=-1)
    rotated = (channels * cosine + swapped * sine).to(channels.dtype)
    if not rest.size(-1):
        return rotated
    return torch.cat([rotated, rest], dim=-1)


def rotate_pairs(channels: torch.Tensor, rotary_emb: torch.Tensor) -> torch.Tensor:
    """Rotate the channels of heads, channel 2i together with channel 2i + 1. All channels are rotary.

    Channels keep their places, so that scores are summed in the same order as in transformers.

    Args:
        channels: [S, B, N, R].
        rotary_emb: [2, S, 1, 1, R] or [2, S, B, 1, R]: for each pair, (c, c) and (-s, s).
    """
    cosine, sine = rotary_emb
    swapped = channels.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (channels * cosine + swapped * sine).to(channels.dtype)


def norm_and_rotate(
    channels: torch.Tensor, weight_D: torch.Tensor, rotary_emb: torch.Tensor, eps: float, is_zero_centered: bool
) -> torch.Tensor:
    """Compute the RMSNorm of each head [S, B, N, D] and rotate its channels (`rotate`), all in float32; rounded once.

    Args:
        is_zero_centered: whether heads are multiplied by 1 + weight.
    """
    wide = channels.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    factor_D = weight_D.float()
    if is_zero_centered:
        factor_D = 1.0 + factor_D
    return rotate(normed * factor_D, rotary_emb).to(channels.dtype)


# A quarter of the bytes that separate operations move. Constant in a run are the rows of a batch, and the heads
fused_rotate = compiled(rotate, static=(3, 1))
fused_rotate_pairs = compiled(rotate_pairs, static=(3, 1))
fused_norm_and_rotate = compiled(norm_and_rotate, static=(3, 1, 1))


def rotation(
    config: TransformerConfig, is_interleaved: bool = False
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function that rotates channels of heads, compiled or not, depending on the model's kernels.

    Args:
        is_interleaved: whether channels 2i and 2i + 1 are rotated together; otherwise i and i + R / 2.
    """
    if is_interleaved:
        return fused_rotate_pairs if config.bias_activation_fusion else rotate_pairs
    if config.bias_activation_fusion:
        return fused_rotate
    return rotate
