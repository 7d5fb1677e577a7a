"""Define a simple reference for speculative decoding with MTP heads, without a cache: heads compute whole rows.

It shares only tensor names and conventions of engines with swiftlite. This module also trains tiny models in seconds,
because drafts of random heads are always wrong, and counts of zero would test nothing. Training ends when the model has
learned its rows, however many steps this takes.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy

from swiftlite.base.drafting import Drafting
from swiftlite.engines.index import ENGINES
from swiftlite.families import FAMILIES
from swiftlite.families.serving.convention import Convention
from tests.tiny import (
    DSA,
    GEMMA4,
    HEADS_WITH_COPIES,
    KIND_OF_HEADS,
    STACKED_TRUNK,
    WINDOWED_HEADS,
    WITH_OWN_OUTPUT,
    TwoLayers,
    embedded,
    final_norm,
    head_in_files,
    head_layer,
    head_name,
    last_of_head,
    logits_of,
    make_tiny_model,
    memory_name,
    mtp_names,
    output_name,
    per_expert,
    random_mtp_tensors,
    write_hf,
)

LEARNED = 1.0
"""Minimum difference between the logit of a learned token and the next largest. Engines differ by 2e-4 in float32, and
by about 0.1 in bfloat16."""
UNDECIDED = 1e-3
"""Difference of two logits below which the order of sums can decide which token an engine chooses."""
MOST_STEPS = 600
"""Maximum number of training steps. Training usually takes 20 to 210 steps."""
MOST_NEW_TOKENS = 24
"""Maximum length of answers for which the prompts of `write_trained` were checked."""
MOST_DRAFTS = 4
"""Maximum number of drafts per step for which the prompts of `write_trained` were checked."""


@dataclass(frozen=True)
class Counts:
    drafts: int
    drafted: int
    accepted_per_position: tuple[int, ...]

    @property
    def acceptance_rate(self) -> float:
        return sum(self.accepted_per_position) / max(self.drafted, 1)


class Reference(nn.Module):
    """A trunk of transformers with MTP heads.

    Args:
        zeroes_first_embedding: whether heads read zeros as the embedding at position 0, as vLLM's MiMo, GLM-4.5 and
            DeepSeek-V3 heads do.
        takes_state_before_norm: whether heads read the trunk's state before its final norm, as vLLM's MiMo heads do.
        recycles_state_before_norm: whether a head that drafts several tokens reads its state before its output norm, as
            vLLM's GLM-4.5 head does.
        chains_state_before_norm: whether a head reads the state of the previous head before its output norm, as vLLM's
            Step-3.5 heads do.
        takes_hidden_first: whether the projection reads the state before the embedding, as in MiMo.
        draft_vocab: ids of the tokens that the heads can draft; empty for all.
    """

    def __init__(self, trunk: Any, family: str, mtp_tensors: dict[str, torch.Tensor], depth: int):
        super().__init__()
        self.trunk, self.family, self.depth = trunk, family, depth
        self.zeroes_first_embedding = self.takes_state_before_norm = False
        self.recycles_state_before_norm = self.chains_state_before_norm = False
        self.takes_hidden_first = family == "mimo"
        self.draft_vocab: list[int] = []
        trunk.set_experts_implementation("eager")
        number = head_layer(family, trunk.config) % trunk.config.num_hidden_layers
        layer_class: Any = type(trunk.model.layers[number])
        norm_class: Any = type(final_norm(trunk))
        config = deepcopy(trunk.config)
        config.hidden_size_per_layer_input = 0  # of Gemma 4, whose heads have no such input
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.trunk: Any
        self.heads = nn.ModuleList()
        for k in range(depth):
            names, block = mtp_names(family, k, config.num_hidden_layers, last_of_head(config))
            norms = {role: norm_class(config.hidden_size, eps) for role in names if "norm" in role}
            head: Any = nn.ModuleDict(norms)
            head["projection"] = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            head["block"] = TwoLayers(config) if family == "nemotron_h" else layer_class(config, layer_idx=number)
            if family in GEMMA4:
                head["block"].self_attn.store_full_length_kv = False  # for layers that share keys
            if family in WITH_OWN_OUTPUT:
                head["output"] = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
                head["output"].weight.data.copy_(mtp_tensors[output_name(block)])
            for role, name in names.items():
                head[role].weight.data.copy_(mtp_tensors[name])
            inner = {name.removeprefix(block): t for name, t in mtp_tensors.items() if name.startswith(block)}
            state = stack_experts({memory_name(family, name): tensor for name, tensor in inner.items()})
            head["block"].load_state_dict({name: state[name] for name in head["block"].state_dict()})
            if "output_norm" not in names:
                head["output_norm"] = final_norm(trunk)
            self.heads.append(head)
        assert trunk.dtype is torch.float32

    @classmethod
    def load(cls, directory: Path, family: str, depth: int) -> "Reference":
        """Read a checkpoint without any MTP code of swiftlite."""
        tensors = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
        config = config.get("text_config", config)
        tensors |= {memory_name(family, name): tensor for name, tensor in tensors.items()}  # heads are read by both
        overrides = {k: v for k, v in config.items() if k not in ("model_type", "architectures", "dtype")}
        trunk = make_tiny_model(family, config["tie_word_embeddings"], **overrides)
        if family in STACKED_TRUNK:
            tensors = per_expert(tensors)
        missing, _ = trunk.load_state_dict(stack_experts(tensors), strict=False)
        assert set(missing) <= {"lm_head.weight"}
        trunk.tie_weights()
        return cls(trunk, family, tensors, depth).eval()

    def mtp_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for k in range(self.depth):
            head: Any = self.heads[k]
            config = self.trunk.config
            names, block = mtp_names(self.family, k, config.num_hidden_layers, last_of_head(config))
            tensors |= {name: head[role].weight.detach() for role, name in names.items()}
            for suffix, tensor in head_in_files(self.family, head["block"].state_dict()).items():
                tensors[block + head_name(self.family, suffix)] = tensor
            if self.family in WITH_OWN_OUTPUT:
                tensors[output_name(block)] = head["output"].weight.detach()
            if self.family in HEADS_WITH_COPIES:
                tensors[f"{block}embed_tokens.weight"] = self.trunk.model.embed_tokens.weight.detach().clone()
                tensors[f"{block}shared_head.head.weight"] = self.trunk.lm_head.weight.detach().clone()
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def trunk_states(self, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states that the heads read, and the states after the final norm, each [B, S, H]."""
        before = []
        handle = final_norm(self.trunk).register_forward_pre_hook(lambda _, args: before.append(args[0]))
        after = self.trunk.model(ids_BS, use_cache=False).last_hidden_state
        handle.remove()
        return (before[0] if self.takes_state_before_norm else after), after

    def head_states(self, k: int, hidden_BSH: torch.Tensor, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states that the next step reads, and the states after the output norm, each [B, S, H]."""
        head: Any = self.heads[k]
        embedding = embedded(self.trunk, ids_BS)
        if self.zeroes_first_embedding:
            embedding = torch.cat((torch.zeros_like(embedding[:, :1]), embedding[:, 1:]), dim=1)
        parts = [head["embedding_norm"](embedding), head["hidden_norm"](hidden_BSH)]
        if self.takes_hidden_first:
            parts.reverse()
        positions = torch.arange(ids_BS.shape[1])[None]
        kinds = [KIND_OF_HEADS[self.family]] if self.family in KIND_OF_HEADS else []
        rotary = None
        if self.family != "nemotron_h":
            rotary = self.trunk.model.rotary_emb(hidden_BSH, positions, *kinds)
        fused = head["projection"](torch.cat(parts, dim=-1))
        before = head["block"](fused, position_embeddings=rotary, attention_mask=self._mask(ids_BS.shape[1]))
        if self.family == "glm_moe_dsa":
            before, _ = before  # and the selected tokens
        after = head["output_norm"](before)
        goes_on_alone = k == self.depth - 1
        takes_before = self.recycles_state_before_norm if goes_on_alone else self.chains_state_before_norm
        return (before if takes_before else after), after

    def head_logits(self, k: int, after: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., V] of head k for states after its output norm."""
        head: Any = self.heads[k]
        if "output" in head:
            return head["output"](after)
        return logits_of(self.trunk, after)

    def trained_logits(
        self, rows_BS: torch.Tensor, hidden_BSH: torch.Tensor, num_drafts: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the logits [B, S, V] of each draft, with the tokens of the rows that it should predict.

        Args:
            hidden_BSH: first result of `trunk_states`.
        """
        pairs = []
        for k in range(num_drafts):
            length = rows_BS.shape[1] - k - 2
            ids_BS = rows_BS[:, k + 1 : k + 1 + length]
            head = min(k, self.depth - 1)
            hidden_BSH, after = self.head_states(head, hidden_BSH[:, :length], ids_BS)
            pairs.append((self.head_logits(head, after), rows_BS[:, k + 2 :]))
        return pairs

    def _mask(self, length: int) -> torch.Tensor | None:
        """Return the mask [1, 1, S, S] of heads with a sliding window; None if heads see all tokens before theirs.

        The attention of gpt-oss and DSA in transformers is causal only with a mask.
        """
        config = self.trunk.config
        if self.family in ("gpt_oss", *DSA):
            return torch.full((1, 1, length, length), -torch.inf).triu(1)
        window = getattr(config, "sliding_window", None)
        is_mixed = getattr(config, "layer_types", None) is not None
        if window is None or (is_mixed and self.family not in WINDOWED_HEADS):
            return None
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        return torch.where(seen, 0.0, -torch.inf)[None, None]

    def draft(self, tokens: list[int], num_tokens: int) -> list[int]:
        """Return the tokens that the heads draft after `tokens`.

        If there are too few heads, the last continues from its own state.
        """
        return self.draft_logits(tokens, num_tokens).argmax(dim=-1).tolist()

    @torch.no_grad()
    def draft_logits(
        self, tokens: list[int], num_tokens: int, trunk_states_BSH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits [num_tokens, V] of the drafts after `tokens`.

        Args:
            trunk_states_BSH: first result of `trunk_states` for a row that starts with `tokens`; later tokens do not
                change these states. None: they are computed.
        """
        if trunk_states_BSH is None:
            trunk_states_BSH, _ = self.trunk_states(torch.tensor([tokens]))
        return self.draft_logits_at(tokens, [len(tokens)], num_tokens, trunk_states_BSH)[0]

    @torch.no_grad()
    def draft_logits_at(
        self, row: list[int], lengths: Sequence[int], num_tokens: int, trunk_states_BSH: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits [B, num_tokens, V] of the drafts after the first `lengths` tokens of a row.

        All are computed at once, with the longest beginning in every row of the batch. What follows a shorter beginning
        and its drafts does not change their logits, because heads are causal.

        Args:
            trunk_states_BSH: as for `draft_logits`.
        """
        batch, ends, longest = torch.arange(len(lengths)), torch.tensor(lengths), max(lengths)
        ids_BS = torch.tensor([row[:longest] + [0] * num_tokens]).repeat(len(lengths), 1)
        hidden = trunk_states_BSH[:, : longest - 1].repeat(len(lengths), 1, 1)
        last = ends - 2  # the last state of each beginning; it is read with the following token
        logits = []
        for j in range(num_tokens):
            if j < self.depth:
                fed, shift = hidden, j + 1
            else:
                fed = torch.cat((fed, hidden[:, -1:]), dim=1)
                fed[batch, last + 1] = hidden[batch, last]
                last = last + 1
            k = min(j, self.depth - 1)
            hidden, after = self.head_states(k, fed, ids_BS[:, shift : shift + fed.size(1)])
            logits.append(self.head_logits(k, after[batch, last]))
            if self.draft_vocab:
                drafted = torch.tensor(self.draft_vocab)
                logits[-1] = torch.full_like(logits[-1], -torch.inf).index_copy(1, drafted, logits[-1][:, drafted])
            ids_BS[batch, ends + j] = logits[-1].argmax(-1)
        return torch.stack(logits, dim=1)

    @torch.no_grad()
    def closest_choice(
        self, prompt: list[int], max_new_tokens: int = MOST_NEW_TOKENS, max_drafts: int = MOST_DRAFTS
    ) -> float:
        """Return the smallest lead of a most likely token over the second, in all choices that an engine may make after
        `prompt`.

        Any number of drafts per step is considered.
        """
        row = prompt + self.greedy(prompt, max_new_tokens + max_drafts)
        fed, states = self.trunk_states(torch.tensor([row]))
        ends = range(len(prompt) + 1, len(prompt) + max_new_tokens)
        drafted = self.draft_logits_at(row, ends, max_drafts, fed).flatten(0, 1)
        logits = torch.cat((logits_of(self.trunk, states[0, len(prompt) - 1 :]), drafted))
        first, second = logits.topk(2).values.unbind(-1)
        return float((first - second).min())

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        (row,) = self.greedy_rows([prompt], num_tokens)
        return row

    @torch.no_grad()
    def greedy_rows(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return greedy continuations. What follows a shorter prompt does not change them: the trunk is causal."""
        batch, ends = torch.arange(len(prompts)), torch.tensor([len(prompt) for prompt in prompts])
        longest = int(ends.max())
        ids_BS = torch.zeros(len(prompts), longest + num_tokens, dtype=torch.long)
        for ids, prompt in zip(ids_BS, prompts, strict=True):
            ids[: len(prompt)] = torch.tensor(prompt)
        for number in range(num_tokens):
            _, states = self.trunk_states(ids_BS[:, : longest + number])
            ids_BS[batch, ends + number] = logits_of(self.trunk, states[batch, ends + number - 1]).argmax(-1)
        return [ids[end : end + num_tokens].tolist() for ids, end in zip(ids_BS, ends, strict=True)]

    @torch.no_grad()
    def simulate(
        self, prompts: list[list[int]], max_new_tokens: int, num_tokens: int, confidence: float = 0.0
    ) -> tuple[list[list[int]], Counts]:
        """Return greedy completions, and the counts of an engine that drafts `num_tokens` per step.

        Drafting stops after the first draft with a probability below `confidence`. The first token follows from the
        prompt alone. A draft past max_new_tokens counts if it is correct, as in vLLM, whose scheduler counts before it
        truncates the output (v1/core/sched/scheduler.py).
        """
        completions, drafts, drafted, accepted = [], 0, 0, [0] * num_tokens
        rows = self.greedy_rows(prompts, max_new_tokens + num_tokens)
        for prompt, row in zip(prompts, rows, strict=True):
            for num_drafted, hits in self._steps(prompt, row, max_new_tokens, num_tokens, confidence):
                drafts += 1
                drafted += num_drafted
                for position in range(hits):
                    accepted[position] += 1
            completions.append(row[:max_new_tokens])
        return completions, Counts(drafts, drafted, tuple(accepted))

    def draft_depths(self, prompts: list[list[int]], max_new_tokens: int, num_tokens: int) -> list[list[int]]:
        """Return for each token of the completions of `simulate` its place in the drafts of its step; 0 for a token of
        the trunk."""
        depths = []
        rows = self.greedy_rows(prompts, max_new_tokens + num_tokens)
        for prompt, row in zip(prompts, rows, strict=True):
            of_row = [0]
            for _, hits in self._steps(prompt, row, max_new_tokens, num_tokens, confidence=0.0):
                of_row += [*range(1, hits + 1), 0]
            depths.append(of_row[:max_new_tokens])
        return depths

    def _steps(
        self, prompt: list[int], row: list[int], max_new_tokens: int, num_tokens: int, confidence: float
    ) -> Iterator[tuple[int, int]]:
        """Yield the number of drafted and of accepted tokens of each step."""
        if max_new_tokens < 2:
            return
        fed, _ = self.trunk_states(torch.tensor([prompt + row]))
        # Also where no step begins: one pass takes less time than one for each step.
        ends = range(len(prompt) + 1, len(prompt) + max_new_tokens)
        logits = self.draft_logits_at(prompt + row, ends, num_tokens, fed)
        done = 1
        while done < max_new_tokens:
            proposal = self._sure_drafts(logits[done - 1], confidence)
            hits = 0
            while hits < len(proposal) and proposal[hits] == row[done + hits]:
                hits += 1
            yield len(proposal), hits
            done += hits + 1

    @staticmethod
    def _sure_drafts(logits: torch.Tensor, confidence: float) -> list[int]:
        proposal = []
        for probabilities in logits.softmax(dim=-1):
            proposal.append(int(probabilities.argmax()))
            if probabilities.max() < confidence:
                break
        return proposal


def convention(engine: str, family: str) -> Convention:
    """Return swiftlite's convention for an engine and a family."""
    return ENGINES[engine].convention_for(FAMILIES[family])


def follow(reference: Reference, drafting: Drafting) -> Reference:
    """Let the reference use these inputs of heads."""
    reference.takes_state_before_norm = drafting.takes_before_norm
    reference.recycles_state_before_norm = drafting.recycles_before_norm
    reference.chains_state_before_norm = drafting.chains_before_norm
    reference.zeroes_first_embedding = drafting.zeroes_first_embedding
    return reference


def with_vocab(model: Path, directory: Path, draft_vocab: list[int]) -> Path:
    """Write the same checkpoint with a draft vocabulary, as `export` does."""
    shutil.copytree(model, directory)
    config = json.loads((directory / "config.json").read_text())
    config["mtp_draft_vocab"] = " ".join(map(str, draft_vocab))
    (directory / "config.json").write_text(json.dumps(config))
    torch.save(draft_vocab, directory / "speculative_token_map.pt")
    return directory


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the tensors of experts with transformers' names. This is the inverse of `as_in_files`."""
    if any(name.endswith("experts.gate_up_proj") for name in tensors):
        return tensors
    if any(name.endswith("moe.gate_proj.weight") for name in tensors):
        return _stacks_of_gate_and_up(tensors)
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in f".{name}"}
    for prefix in {name.partition("experts.")[0] for name in tensors if "mixer.experts." in name}:
        for kind in ("up_proj", "down_proj"):
            count = sum(name.startswith(f"{prefix}experts.") for name in tensors) // 2
            parts = [tensors[f"{prefix}experts.{expert}.{kind}.weight"] for expert in range(count)]
            stacked[f"{prefix}experts.{kind}"] = torch.stack(parts)
    gates = (name for name in tensors if ".experts." in f".{name}" and ".gate_proj." in name)
    for prefix in {name.partition("experts.")[0] for name in gates}:
        count = sum(name.startswith(f"{prefix}experts.") for name in tensors) // 3

        def part(expert: int, kind: str, prefix: str = prefix) -> torch.Tensor:
            return tensors[f"{prefix}experts.{expert}.{kind}.weight"]

        gate_up = [torch.cat((part(e, "gate_proj"), part(e, "up_proj"))) for e in range(count)]
        stacked[f"{prefix}experts.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"{prefix}experts.down_proj"] = torch.stack([part(e, "down_proj") for e in range(count)])
    return stacked


def _stacks_of_gate_and_up(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Invert `per_matrix`."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".moe." not in name}
    for name in tensors.keys() - stacked.keys():
        prefix, _, matrix = name.partition("moe.")
        if matrix == "gate_proj.weight":
            gate_up = (tensors[f"{prefix}moe.{kind}_proj.weight"] for kind in ("gate", "up"))
            stacked[f"{prefix}mlp.experts.gate_up_proj"] = torch.cat(tuple(gate_up), dim=1)
        elif matrix == "down_proj.weight":
            stacked[f"{prefix}mlp.experts.down_proj"] = tensors[name]
    return stacked


def smallest_lead(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the smallest lead of a target's logit over all other logits: logits [..., V], targets [...]."""
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
    """Write a tiny checkpoint whose heads are often correct, but not always; return prompts, half of them from learned
    rows.

    Trunk and heads learn 8 random sequences by heart. On new prompts, the heads are mostly wrong. For none of the
    prompts does a choice depend on the order in which an engine adds.

    Args:
        unroll: number of steps in which the last head continues from its own state, if it is larger than `depth`.
        draft_as: sets the inputs of the heads, for which they are then trained.
        config: arguments of `make_tiny_model`.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are tiny: a second thread only waits, ten times as long on a busy machine
    torch.manual_seed(1)
    trunk: Any = make_tiny_model(family, tied=tied, **config)
    # Far from flat, and every other one negative, so that the state before a norm is another one than behind it.
    sign_H = torch.tensor([1.0, -1.0]).repeat(trunk.config.hidden_size // 2)
    final_norm(trunk).weight.data.uniform_(0.3, 3.0).mul_(sign_H)
    model = draft_as(Reference(trunk, family, random_mtp_tensors(trunk, family, depth), depth))
    for head in model.heads:
        output_norm: Any = head["output_norm"]  # pyright: ignore[reportIndexIssue]
        output_norm.weight.data.uniform_(0.3, 3.0).mul_(sign_H)
    vocab_size = trunk.config.vocab_size
    rows_BS = torch.randint(0, vocab_size, (8, 40))
    rows_BS[:, 0] = torch.randperm(vocab_size)[:8]  # what follows a first token is one thing
    learn_by_heart(model, rows_BS, unroll)
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(".sinks"):  # SGLang has them in bfloat16
            parameter.data = parameter.bfloat16().float()
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
    """Train trunk and heads until they predict every next token of the rows with the lead LEARNED.

    Args:
        unroll: as for `write_trained`.

    Raises:
        AssertionError: they have not learned the rows in MOST_STEPS steps.
    """
    # Attention stays as it was drawn: wide latent attention would take ten times as many steps to settle.
    learning = []
    for name, parameter in model.named_parameters():
        if "self_attn" not in name and parameter is not final_norm(model.trunk).weight:
            learning.append(parameter)
    optimizer = torch.optim.AdamW(learning, lr=2.4e-2, betas=(0.9, 0.98))
    slower = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 25))
    for _ in range(MOST_STEPS):
        hidden, after = model.trunk_states(rows_BS)
        said = [(logits_of(model.trunk, after[:, :-1]), rows_BS[:, 1:])]
        said += model.trained_logits(rows_BS, hidden, max(model.depth, unroll))
        if all(smallest_lead(logits.detach(), targets) > LEARNED for logits, targets in said):
            return
        loss = torch.stack([cross_entropy(logits.flatten(0, 1), targets.flatten()) for logits, targets in said]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    raise AssertionError(f"not learned in {MOST_STEPS} steps")
