"""Rules of `megatron pt`, which are those of `megatron sft`."""

from swiftlite.rules.training import sft

RULES = sft.RULES
NOTES = sft.NOTES
