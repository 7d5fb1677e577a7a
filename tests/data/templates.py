"""Chat templates that behave like those of well-known models, and small tokenizers that are trained when needed."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "What does this function do? It returns the sum of its arguments.",
    "Hello, how are you? I am fine, thank you. The weather in Paris is sunny.",
    "2 + 2 = 4, and that is all there is to say about it.",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|header|>", "<|end_header|>", "<|eot|>"]
SPECIAL += ["<|user|>", "<|assistant|>"]

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}\
{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- for call in m.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML_GENERATION = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ m.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# Text is trimmed, headers carry the role, a tool call ends otherwise than an answer.
LLAMA3 = """\
{{- '<s>' }}
{%- for m in messages %}
    {{- '<|header|>' + m.role + '<|end_header|>\\n\\n' }}
    {%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
    {{- m.content | trim }}{{ '</s>' if m.tool_calls else '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\\n\\n' }}{% endif %}"""

# Thinking stays only after the last user turn; the last turn gets an empty one if it has none.
QWEN3 = """\
{%- set ns = namespace(last_user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set role = 'user' if m.role == 'tool' else m.role %}
    {%- set thinking = m.reasoning_content or '' %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last_user and (loop.last or thinking) %}
        {{- '<think>\\n' + thinking + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# No generation prompt, a space before the answer, system joined to the first question.
MISTRAL = """\
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}
    {%- if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""

# Turns end where the next header begins.
GLM = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# No special token anywhere.
ALPACA = """\
{%- for m in messages %}
    {{- '### ' + m.role + ': ' + m.content + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"""

# The generation prompt opens the thinking, so an empty one shares a newline token with it.
OPEN_THINK = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and '<think>' not in m.content %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
    {{- m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

# Drops all thinking, yet its generation prompt opens one.
R1 = """\
{%- for m in messages %}
    {{- '<|' + m.role + '|>' + m.content.split('</think>')[-1] + ('</s>' if m.role == 'assistant' else '') }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"""


def train_bytes(trim_offsets: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    if trim_offsets:  # as GPT-2
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    else:  # as Qwen2 and Llama 3: lines that end together are one token
        words = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"), "isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*CORPUS, "a\n\n" * 9], trainer)
    return tokenizer


def train_metaspace() -> Tokenizer:
    """Return a tokenizer like Llama 2's: spaces are part of words, and every text gets a space in front."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    saved = json.loads(tokenizer.to_str())
    for byte in range(256):
        saved["model"]["vocab"][f"<0x{byte:02X}>"] = len(saved["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(saved))
