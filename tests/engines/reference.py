"""Speculative decoding with MTP heads, written to be obviously right: no cache, every head recomputed at every step.

Shares nothing with the product but the tensor names of a checkpoint and the conventions of engines. Also trains a tiny
model in seconds, because drafts of random heads are always wrong, and counts of zero prove nothing: until it has
learned, however many steps that takes on the processor at hand.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from swiftlite.conventions.convention import Convention
from swiftlite.engines.index import ENGINES
from swiftlite.families import FAMILIES
from swiftlite.heads.drafting import Drafting
from tests.tiny import (
    HEADS_WITH_COPIES,
    hub_name,
    make_tiny_model,
    memory_name,
    mtp_names,
    per_expert,
    random_mtp_tensors,
    write_hf,
)

LEARNED = 1.0
"""By how much the logit of a learned token leads; engines differ by 2e-4 in float32, by some 0.1 in bfloat16."""
UNDECIDED = 1e-3
"""Where two logits are as close as this, the order of sums decides which token an engine takes."""
MOST_STEPS = 600
"""The bound of training, which takes 20 to 210 steps."""
MOST_NEW_TOKENS = 24
"""The length of an answer that the prompts of `write_trained` are good for."""
MOST_DRAFTS = 4
"""The drafts per step that they are good for."""


@dataclass(frozen=True)
class Counts:
    drafts: int
    drafted: int
    accepted_per_position: tuple[int, ...]

    @property
    def acceptance_rate(self) -> float:
        return sum(self.accepted_per_position) / max(self.drafted, 1)


class Reference(nn.Module):
    """A trunk of transformers and its MTP heads.

    Args:
        zeroes_first_embedding: vLLM's MiMo, GLM-4.5 and DeepSeek-V3 heads see zeros for the embedding at position 0.
        takes_state_before_norm: vLLM's MiMo heads get the trunk's state before its final norm.
        recycles_state_before_norm: vLLM's GLM-4.5 head, when it goes on alone, gets its state before its output norm.
        takes_hidden_first: MiMo's projection takes the state, then the embedding.
        draft_vocab: ids of the tokens that the heads can draft; empty for all.
    """

    def __init__(self, trunk: Any, family: str, mtp_tensors: dict[str, torch.Tensor], depth: int):
        super().__init__()
        self.trunk, self.family, self.depth = trunk, family, depth
        self.zeroes_first_embedding = self.takes_state_before_norm = self.recycles_state_before_norm = False
        self.takes_hidden_first = family == "mimo"
        self.draft_vocab: list[int] = []
        trunk.set_experts_implementation("eager")
        layer_class: Any = type(trunk.model.layers[-1])
        norm_class: Any = type(trunk.model.norm)
        config = trunk.config
        self.trunk: Any
        self.heads = nn.ModuleList()
        for k in range(depth):
            names, block = mtp_names(family, k, config.num_hidden_layers)
            norms = {role: norm_class(config.hidden_size, config.rms_norm_eps) for role in names if "norm" in role}
            head: Any = nn.ModuleDict(norms)
            head["projection"] = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            # The last layer's number: it has experts where the first is dense.
            head["block"] = layer_class(config, layer_idx=config.num_hidden_layers - 1)
            for role, name in names.items():
                head[role].weight.data.copy_(mtp_tensors[name])
            inner = {name.removeprefix(block): t for name, t in mtp_tensors.items() if name.startswith(block)}
            state = stack_experts({memory_name(family, name): tensor for name, tensor in inner.items()})
            head["block"].load_state_dict({name: state[name] for name in head["block"].state_dict()})
            self.heads.append(head)
        assert trunk.dtype is torch.float32

    @classmethod
    def load(cls, directory: Path, family: str, depth: int) -> "Reference":
        """Read a checkpoint without any MTP code of the product."""
        tensors = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
        config = config.get("text_config", config)
        tensors = {memory_name(family, name): tensor for name, tensor in tensors.items()}
        overrides = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "dtype")}
        trunk = make_tiny_model(family, config["tie_word_embeddings"], **overrides)
        missing, _ = trunk.load_state_dict(stack_experts(tensors), strict=False)
        assert set(missing) <= {"lm_head.weight"}
        trunk.tie_weights()
        return cls(trunk, family, tensors, depth).eval()

    def mtp_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for k in range(self.depth):
            head: Any = self.heads[k]
            names, block = mtp_names(self.family, k, self.trunk.config.num_hidden_layers)
            tensors |= {name: head[role].weight.detach() for role, name in names.items()}
            for suffix, tensor in per_expert(head["block"].state_dict()).items():
                tensors[block + hub_name(self.family, suffix)] = tensor
            if self.family in HEADS_WITH_COPIES:
                tensors[f"{block}embed_tokens.weight"] = self.trunk.model.embed_tokens.weight.detach().clone()
                tensors[f"{block}shared_head.head.weight"] = self.trunk.lm_head.weight.detach().clone()
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def trunk_states(self, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the heads are fed, after the final norm), each [B, S, H]."""
        before = []
        handle = self.trunk.model.norm.register_forward_pre_hook(lambda _, args: before.append(args[0]))
        after = self.trunk.model(ids_BS, use_cache=False).last_hidden_state
        handle.remove()
        return (before[0] if self.takes_state_before_norm else after), after

    def head_states(self, k: int, hidden_BSH: torch.Tensor, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the next step is fed, after the output norm), each [B, S, H]."""
        head: Any = self.heads[k]
        embedding = self.trunk.model.embed_tokens(ids_BS)
        if self.zeroes_first_embedding:
            embedding = torch.cat((torch.zeros_like(embedding[:, :1]), embedding[:, 1:]), dim=1)
        parts = [head["embedding_norm"](embedding), head["hidden_norm"](hidden_BSH)]
        if self.takes_hidden_first:
            parts.reverse()
        positions = torch.arange(ids_BS.shape[1])[None]
        rotary = self.trunk.model.rotary_emb(hidden_BSH, positions)
        fused = head["projection"](torch.cat(parts, dim=-1))
        before = head["block"](fused, position_embeddings=rotary)
        after = head["output_norm"](before)
        goes_on_alone = k == self.depth - 1
        return (before if self.recycles_state_before_norm and goes_on_alone else after), after

    def draft(self, tokens: list[int], num_tokens: int) -> list[int]:
        """What the heads propose after `tokens`; beyond their number, the last one goes on from its own state."""
        return self.draft_logits(tokens, num_tokens).argmax(dim=-1).tolist()

    @torch.no_grad()
    def draft_logits(
        self, tokens: list[int], num_tokens: int, trunk_states_BSH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[num_tokens, V] of the drafts after `tokens`.

        Args:
            trunk_states_BSH: what `trunk_states` returns first, of a row that begins with `tokens`: no state depends on
                the tokens behind it. Unset: it is computed.
        """
        if trunk_states_BSH is None:
            trunk_states_BSH, _ = self.trunk_states(torch.tensor([tokens]))
        hidden = trunk_states_BSH[:, : len(tokens) - 1]
        ids, logits = list(tokens), []
        for j in range(num_tokens):
            if j < self.depth:
                fed, shift = hidden, j + 1
            else:
                fed = torch.cat((fed, hidden[:, -1:]), dim=1)
            k = min(j, self.depth - 1)
            hidden, after = self.head_states(k, fed, torch.tensor([ids[shift:]]))
            logits.append(self.trunk.lm_head(after[0, -1]))
            if self.draft_vocab:
                drafted = torch.tensor(self.draft_vocab)
                logits[-1] = torch.full_like(logits[-1], -torch.inf).index_copy(0, drafted, logits[-1][drafted])
            ids.append(int(logits[-1].argmax()))
        return torch.stack(logits)

    @torch.no_grad()
    def closest_choice(
        self, prompt: list[int], max_new_tokens: int = MOST_NEW_TOKENS, max_drafts: int = MOST_DRAFTS
    ) -> float:
        """The smallest lead of a most likely token over the second, of all choices that an engine may have to make
        after `prompt`, however many tokens it drafts per step."""
        row = prompt + self.greedy(prompt, max_new_tokens + max_drafts)
        fed, states = self.trunk_states(torch.tensor([row]))
        logits = [self.trunk.lm_head(states[0, len(prompt) - 1 :])]
        for end in range(len(prompt) + 1, len(prompt) + max_new_tokens):
            logits.append(self.draft_logits(row[:end], max_drafts, fed))
        first, second = torch.cat(logits).topk(2).values.unbind(-1)
        return float((first - second).min())

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        (row,) = self.greedy_rows([prompt], num_tokens)
        return row

    @torch.no_grad()
    def greedy_rows(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations; prompts of one length at once."""
        rows: list[list[int]] = [[] for _ in prompts]
        for length in {len(prompt) for prompt in prompts}:
            numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            ids_BS = torch.tensor([prompts[number] for number in numbers])
            for _ in range(num_tokens):
                _, states = self.trunk_states(ids_BS)
                following = self.trunk.lm_head(states[:, -1]).argmax(-1, keepdim=True)
                ids_BS = torch.cat((ids_BS, following), dim=1)
            for number, ids in zip(numbers, ids_BS[:, length:].tolist(), strict=True):
                rows[number] = ids
        return rows

    @torch.no_grad()
    def simulate(
        self, prompts: list[list[int]], max_new_tokens: int, num_tokens: int, confidence: float = 0.0
    ) -> tuple[list[list[int]], Counts]:
        """Greedy completions, and the counts of an engine that drafts `num_tokens` per step, or up to the first draft
        that is less likely than `confidence`.

        The first token comes from the prompt alone. A draft past max_new_tokens counts when it matches, as in vLLM,
        whose scheduler takes its statistics before it cuts the output (v1/core/sched/scheduler.py).
        """
        completions, drafts, drafted, accepted = [], 0, 0, [0] * num_tokens
        rows = self.greedy_rows(prompts, max_new_tokens + num_tokens)
        for prompt, row in zip(prompts, rows, strict=True):
            fed, _ = self.trunk_states(torch.tensor([prompt + row]))
            done = 1
            while done < max_new_tokens:
                logits = self.draft_logits(prompt + row[:done], num_tokens, fed)
                proposal = self._sure_drafts(logits, confidence)
                drafted += len(proposal)
                hits = 0
                while hits < len(proposal) and proposal[hits] == row[done + hits]:
                    accepted[hits] += 1
                    hits += 1
                drafts += 1
                done += hits + 1
            completions.append(row[:max_new_tokens])
        return completions, Counts(drafts, drafted, tuple(accepted))

    @staticmethod
    def _sure_drafts(logits: torch.Tensor, confidence: float) -> list[int]:
        proposal = []
        for probabilities in logits.softmax(dim=-1):
            proposal.append(int(probabilities.argmax()))
            if probabilities.max() < confidence:
                break
        return proposal


def convention(engine: str, family: str) -> Convention:
    """What the product says of an engine and a family."""
    return ENGINES[engine].convention_for(FAMILIES[family])


def follow(reference: Reference, drafting: Drafting) -> Reference:
    """Let the reference feed its heads so."""
    reference.takes_state_before_norm = drafting.takes_before_norm
    reference.recycles_state_before_norm = drafting.recycles_before_norm
    reference.zeroes_first_embedding = drafting.zeroes_first_embedding
    return reference


def with_vocab(model: Path, directory: Path, draft_vocab: list[int]) -> Path:
    """The same checkpoint with a draft vocabulary, as `export` writes one."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    config["mtp_draft_vocab"] = " ".join(map(str, draft_vocab))
    (directory / "config.json").write_text(json.dumps(config))
    torch.save(draft_vocab, directory / "speculative_token_map.pt")
    return directory


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `per_expert`."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition("experts.")[0] for name in tensors.keys() - stacked.keys()}:
        count = sum(name.startswith(f"{prefix}experts.") for name in tensors) // 3

        def part(expert: int, kind: str, prefix: str = prefix) -> torch.Tensor:
            return tensors[f"{prefix}experts.{expert}.{kind}.weight"]

        gate_up = [torch.cat((part(e, "gate_proj"), part(e, "up_proj"))) for e in range(count)]
        stacked[f"{prefix}experts.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"{prefix}experts.down_proj"] = torch.stack([part(e, "down_proj") for e in range(count)])
    return stacked


def smallest_lead(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """The lead of the target's logit over all others, where it is smallest: logits [..., V], targets [...]."""
    targets = targets.unsqueeze(-1)
    others = logits.scatter(-1, targets, -torch.inf)
    leads = logits.gather(-1, targets).squeeze(-1) - others.amax(-1)
    return float(leads.min())


def write_trained(
    directory: Path,
    family: str,
    depth: int,
    tied: bool = False,
    unroll: int = 1,
    draft_as: Callable[[Reference], Reference] = lambda reference: reference,
    **config,
) -> list[list[int]]:
    """A tiny checkpoint whose heads are often right, not always; returns prompts, half from what it has learned.

    Trunk and heads learn 8 random sequences by heart; on prompts that are new to them the heads are mostly wrong. After
    none of the prompts does a choice hang on the order in which an engine adds.

    Args:
        unroll: steps in which the last head goes on from its own state, in place, if that are more than `depth`.
        draft_as: sets how the heads are run, which they are then trained for.
        config: of `make_tiny_model`.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny: a second thread only waits, ten times as long on a busy machine
    torch.manual_seed(1)
    trunk: Any = make_tiny_model(family, tied=tied, **config)
    # Far from flat, and every other one negative, so that the state before a norm is another one than behind it.
    sign_H = torch.tensor([1.0, -1.0]).repeat(trunk.config.hidden_size // 2)
    trunk.model.norm.weight.data.uniform_(0.3, 3.0).mul_(sign_H)
    model = draft_as(Reference(trunk, family, random_mtp_tensors(trunk, family, depth), depth))
    for head in model.heads:
        output_norm: Any = head["output_norm"]  # pyright: ignore[reportIndexIssue]
        output_norm.weight.data.uniform_(0.3, 3.0).mul_(sign_H)
    vocab_size = trunk.config.vocab_size
    rows_BS = torch.randint(0, vocab_size, (8, 40))
    rows_BS[:, 0] = torch.randperm(vocab_size)[:8]  # what follows a first token is one thing
    learn_by_heart(model, rows_BS, unroll)
    model.eval().requires_grad_(False)
    write_hf(directory, trunk, family, model.mtp_tensors(), depth)
    # What the head sees at position 0 is felt in short rows. The longest prompt and its answer are a learned row.
    lengths = (1, 4, 9, 13, 1, 1, 1, 1)
    prompts = [row[:length].tolist() for row, length in zip(rows_BS, lengths, strict=True)]
    for length in (2, 5, 10, 17, 1, 1, 1, 1):
        prompt: list[int] = torch.randint(0, vocab_size, (length,)).tolist()
        while model.closest_choice(prompt) < UNDECIDED:
            prompt = torch.randint(0, vocab_size, (length,)).tolist()
        prompts.append(prompt)
    torch.set_num_threads(num_threads)
    return prompts


def learn_by_heart(model: Reference, rows_BS: torch.Tensor, unroll: int) -> None:
    """Train trunk and heads until they say every token of the rows next, LEARNED ahead of any other token.

    Args:
        unroll: as of `write_trained`.

    Raises:
        AssertionError: they have not learned in MOST_STEPS.
    """
    # Attention stays as it was drawn: wide latent attention would take ten times as many steps to settle.
    learning = []
    for name, parameter in model.named_parameters():
        if "self_attn" not in name and name != "trunk.model.norm.weight":
            learning.append(parameter)
    optimizer = torch.optim.AdamW(learning, lr=2.4e-2, betas=(0.9, 0.98))
    slower = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 25))
    for _ in range(MOST_STEPS):
        hidden, after = model.trunk_states(rows_BS)
        said = [(model.trunk.lm_head(after[:, :-1]), rows_BS[:, 1:])]
        for k in range(max(model.depth, unroll)):
            length = rows_BS.shape[1] - k - 2
            ids_BS = rows_BS[:, k + 1 : k + 1 + length]
            hidden, after = model.head_states(min(k, model.depth - 1), hidden[:, :length], ids_BS)
            said.append((model.trunk.lm_head(after), rows_BS[:, k + 2 :]))
        if all(smallest_lead(logits.detach(), targets) > LEARNED for logits, targets in said):
            return
        loss = torch.stack([cross_entropy(logits.flatten(0, 1), targets.flatten()) for logits, targets in said]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    raise AssertionError(f"not learned in {MOST_STEPS} steps")
