"""Implement `megatron sft`: the next-token loss over conversations."""

from swiftlite.train.methods.conversations import make_conversation_encoder
from swiftlite.train.methods.next_token import next_token_objective
from swiftlite.train.methods.training import Training

SFT = Training(make_encoder=make_conversation_encoder, make_objective=next_token_objective)
