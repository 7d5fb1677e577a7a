"""Replace SGLang's compiled kernels, which PyPI has only for CUDA: the kernels that a small text model needs.

These are attention in float32, one request after another, and the management of slots and drafts. Drafts must be a
chain (topk 1); a tree is rejected. Other kernels can be imported, and raise an error when they are called. Row r of
req_to_token contains the slots of the keys and values of request r, by position.
"""

import torch
from absent import Submodules, absent

__getattr__ = absent
Submodules(__name__)


def assign_req_to_token_pool_cpu(rows, req_to_token, starts, ends, slots, pool_len):
    """Write each request's new slots into its row."""
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[: end - start]
        slots = slots[end - start :]


def assign_extend_cache_locs_cpu(rows, req_to_token, starts, ends, slots, pool_len):
    """Read the slots from `start` to `end` of each request's row, one request after another."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([req_to_token[row, start:end] for row, start, end in spans])
    slots[: len(found)] = found


def assign_draft_cache_locs_contiguous_cpu(rows, req_to_token, seq_lens, slots, pool_len, topk, num_steps):
    """Return the slots after each request's last token, for its drafts."""
    assign_extend_cache_locs_cpu(rows, req_to_token, seq_lens, seq_lens + topk * num_steps, slots, pool_len)


def build_draft_decode_metadata_cpu(req_to_token, rows, seq_lens, topk, num_steps, pool_len):
    """Return one row of slots for each draft. In a chain, this is the row of its request."""
    _refuse_tree(topk)
    return req_to_token[rows]


def build_tree_kernel_efficient_cpu(
    parents,
    selected,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    num_steps,
    num_draft_tokens,
    tree_mask_mode,
):
    """Return the position of the newest token and of the drafts after it, and their order."""
    _refuse_tree(topk)
    number = torch.arange(num_draft_tokens)
    positions.copy_((seq_lens[:, None] + number).flatten())
    retrieve_index.copy_(torch.arange(retrieve_index.numel()).view_as(retrieve_index))
    retrieve_next_token.copy_((number + 1).where(number + 1 < num_draft_tokens, -1).expand_as(retrieve_next_token))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Accept drafts as long as each equals the target's prediction at the previous token.

    Args:
        predicts: [B * N], written: the target's token after each accepted token.
        accept_index: [B, N], written: indices of the newest token and of the accepted drafts.
        accept_token_num: [B], written: number of accepted drafts.
        candidates: [B, N], the newest token and the drafts.
        target_predict: [B, N], the target's token after each.
    """
    num_tokens = candidates.shape[1]
    target_predict = target_predict.view_as(candidates)
    for number, (drafts, wanted) in enumerate(zip(candidates.tolist(), target_predict.tolist(), strict=True)):
        hits = 0
        while hits + 1 < num_tokens and drafts[hits + 1] == wanted[hits]:
            hits += 1
        place = number * num_tokens
        predicts[place : place + hits + 1] = target_predict[number, : hits + 1]
        accept_index[number, : hits + 1] = torch.arange(place, place + hits + 1)
        accept_token_num[number] = hits


def tree_speculative_sampling_target_only(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    """Accept each draft with the probability that the target gives it, and draw the token after the last accepted one.

    Drafts are the most likely tokens of the head, so a rejected token has no probability in the final draw. The
    arguments are those of `verify_tree_greedy_cpu`, and:

    Args:
        uniform_samples: [B, N], for the decision about each draft.
        uniform_samples_for_final_sampling: [B], for the token after the last accepted one.
        target_probs: [B, N, V], of the token after each candidate.
        draft_probs: [B, N, V], zeros.
    """
    assert threshold_single == threshold_acc == 1.0
    num_tokens = candidates.shape[1]
    for number, drafts in enumerate(candidates.tolist()):
        place, hits = number * num_tokens, 0
        while hits + 1 < num_tokens:
            draft = drafts[hits + 1]
            if uniform_samples[number, hits] > target_probs[number, hits, draft]:
                break
            predicts[place + hits] = draft
            hits += 1
        left = target_probs[number, hits].clone()
        if hits + 1 < num_tokens:
            left[drafts[hits + 1]] = 0.0
        sums = left.double().cumsum(0)
        drawn = torch.searchsorted(sums, sums[-1] * uniform_samples_for_final_sampling[number].double(), right=True)
        predicts[place + hits] = drawn
        accept_index[number, : hits + 1] = torch.arange(place, place + hits + 1)
        accept_token_num[number] = hits


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride):
    """Write the last accepted token of each request."""
    first = torch.arange(len(accept_lens)) * stride
    bonus_tokens.copy_(accept_tokens.flatten()[first + accept_lens - 1])


def fill_accept_out_cache_loc_cpu(accept_index, slots, accepted_slots):
    """Write the slots of the accepted tokens, one after another."""
    kept = slots[accept_index[accept_index > -1]]
    accepted_slots[: len(kept)] = kept


def copy_all_layer_kv_cache_cpu(data_pointers, strides, targets, sources):
    """Do nothing: in a chain, accepted drafts are already in their slots."""
    assert torch.equal(targets, sources)


def decode_attention_cpu(
    queries_BNH,
    key_buffer,
    value_buffer,
    key_scale,
    value_scale,
    output_BNH,
    keys,
    values,
    slots,
    attention_logits,
    req_to_token,
    rows,
    seq_lens,
    scaling,
    logit_cap,
    is_cross_attention,
    window,
    encoder_lens=None,
    sinks=None,
    *_,
):
    """Compute attention for one new token per request. If its key and value are given, they are stored."""
    if keys is not None:
        key_buffer[slots] = keys.view(-1, *key_buffer.shape[1:])
        value_buffer[slots] = values.view(-1, *value_buffer.shape[1:])
    for number, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        kept = req_to_token[row, :length].long()
        query = queries_BNH[number : number + 1]
        output_BNH[number] = _attend(query, key_buffer[kept], value_buffer[kept], scaling, window, sinks)


def extend_attention_cpu(
    queries_TNH,
    keys_TNH,
    values_TNH,
    output_TNH,
    key_buffer,
    value_buffer,
    key_scale,
    value_scale,
    req_to_token,
    rows,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_extend_len,
    scaling,
    logit_cap,
    is_cross_attention,
    window,
    encoder_lens=None,
    sinks=None,
    *_,
):
    """Compute attention for several new tokens per request, concatenated in T.

    Each token sees the stored tokens and the new tokens before it.
    """
    spans = zip(*(t.tolist() for t in (rows, seq_lens, extend_seq_lens, extend_start_loc)), strict=True)
    for row, length, num_new, start in spans:
        kept, new = req_to_token[row, : length - num_new].long(), slice(start, start + num_new)
        keys = keys_TNH[new].reshape(num_new, -1, queries_TNH.shape[-1])
        values = values_TNH[new].reshape(num_new, -1, output_TNH.shape[-1])
        if len(kept) > 0:  # a prompt of DeepSeek's has other keys than those that are kept
            keys, values = torch.cat((key_buffer[kept], keys)), torch.cat((value_buffer[kept], values))
        output_TNH[new] = _attend(queries_TNH[new], keys, values, scaling, window, sinks)


def _attend(queries_TNH, keys_SGH, values_SGH, scaling, window, sinks_N):
    """Compute attention of the last T of S positions to themselves and the `window - 1` positions before them.

    N query heads share G key-value heads. Window 0 stands for all positions. A sink is a score without a value.
    """
    queries, keys, values = (t.transpose(0, 1).float() for t in (queries_TNH, keys_SGH, values_SGH))
    share = len(queries) // len(keys)
    scores = queries @ keys.repeat_interleave(share, 0).mT * scaling
    place = scores.shape[2] - scores.shape[1]  # of the first query
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + place)
    if window:
        hidden |= torch.ones_like(hidden).tril(place - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks_N is not None:
        scores = torch.cat([scores, sinks_N.float()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return (weights @ values.repeat_interleave(share, 0)).transpose(0, 1)


def _refuse_tree(topk):
    if topk != 1:
        raise NotImplementedError("a tree of drafts has no stand-in: give topk 1")


# SGLang looks for these two among torch's operators.
for _operator in (decode_attention_cpu, extend_attention_cpu):
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)
# Several draft classes wait for a GPU when they are given the target's embedding, also where there is none.
torch.cuda.synchronize = lambda device=None: None
