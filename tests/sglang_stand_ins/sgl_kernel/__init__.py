"""Stands in for SGLang's compiled kernels, of which PyPI has a CUDA build alone: those that a small text model needs.

Attention in float32, one request after the other, and the bookkeeping of slots and drafts. Drafts form a chain (topk
1); a tree is refused. What is not here can be imported, and says so when it is called. Row r of req_to_token
holds the slots in which the keys and values of request r are kept, position by position.
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
    """Read each request's slots from `start` to `end` out of its row, one request after the other."""
    spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([req_to_token[row, start:end] for row, start, end in spans])
    slots[: len(found)] = found


def assign_draft_cache_locs_contiguous_cpu(rows, req_to_token, seq_lens, slots, pool_len, topk, num_steps):
    """The slots behind each request's last token, in which its drafts will be kept."""
    assign_extend_cache_locs_cpu(rows, req_to_token, seq_lens, seq_lens + topk * num_steps, slots, pool_len)


def build_draft_decode_metadata_cpu(req_to_token, rows, seq_lens, topk, num_steps, pool_len):
    """One row of slots for each draft that is being made; of a chain, that of its request."""
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
    """The newest token and the drafts behind it: where each stands, and which comes after which."""
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
    """Accept drafts as long as each is what the target says at the token before it.

    Args:
        predicts: [B * N], written: the target's token after each accepted one.
        accept_index: [B, N], written: places of the newest token and of the accepted drafts.
        accept_token_num: [B], written: how many drafts were accepted.
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


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride):
    """The last accepted token of each request."""
    first = torch.arange(len(accept_lens)) * stride
    bonus_tokens.copy_(accept_tokens.flatten()[first + accept_lens - 1])


def fill_accept_out_cache_loc_cpu(accept_index, slots, accepted_slots):
    """The slots of the accepted tokens, one after the other."""
    kept = slots[accept_index[accept_index > -1]]
    accepted_slots[: len(kept)] = kept


def copy_all_layer_kv_cache_cpu(data_pointers, strides, targets, sources):
    """The accepted drafts of a chain are kept where they belong already."""
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
    *_,
):
    """One new token per request, to be attended to as well; its key and value are kept when they are given."""
    if keys is not None:
        key_buffer[slots] = keys.view(-1, *key_buffer.shape[1:])
        value_buffer[slots] = values.view(-1, *value_buffer.shape[1:])
    for number, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        kept = req_to_token[row, :length].long()
        output_BNH[number] = _attend(queries_BNH[number : number + 1], key_buffer[kept], value_buffer[kept], scaling)


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
    *_,
):
    """Several new tokens per request, one request after the other in T; each sees what was kept and those before it."""
    spans = zip(*(t.tolist() for t in (rows, seq_lens, extend_seq_lens, extend_start_loc)), strict=True)
    for row, length, num_new, start in spans:
        kept, new = req_to_token[row, : length - num_new].long(), slice(start, start + num_new)
        keys = keys_TNH[new].reshape(num_new, -1, queries_TNH.shape[-1])
        values = values_TNH[new].reshape(num_new, -1, output_TNH.shape[-1])
        if len(kept) > 0:  # a prompt of DeepSeek's has other keys than those that are kept
            keys, values = torch.cat((key_buffer[kept], keys)), torch.cat((value_buffer[kept], values))
        output_TNH[new] = _attend(queries_TNH[new], keys, values, scaling)


def _attend(queries_TNH, keys_SGH, values_SGH, scaling):
    """The last T of S positions look at all before them; G heads of keys and values are shared by N of queries."""
    queries, keys, values = (t.transpose(0, 1).float() for t in (queries_TNH, keys_SGH, values_SGH))
    share = len(queries) // len(keys)
    scores = queries @ keys.repeat_interleave(share, 0).mT * scaling
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    return (weights @ values.repeat_interleave(share, 0)).transpose(0, 1)


def _refuse_tree(topk):
    if topk != 1:
        raise NotImplementedError("a tree of drafts has no stand-in: give topk 1")


# SGLang looks for these two among torch's operators.
for _operator in (decode_attention_cpu, extend_attention_cpu):
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)
# Several draft classes wait for a GPU when they are given the target's embedding, also where there is none.
torch.cuda.synchronize = lambda device=None: None
