"""Tokenizers with chat templates for tests of conversations."""

import tokenizers
import transformers

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content + '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


UNMARKED = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


INSTRUCTIONS = """\
{{ bos_token }}{% for message in messages %}
{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}
{% if message.role == 'user' %}{{ '[INST] ' ~ message.content | trim ~ ' [/INST]' }}{% else %}
{{ ' ' ~ message.content ~ eos_token }}{% endif %}{% if message.content == 'stop' %}{% break %}
{% endif %}{% endfor %}"""


LAST_THINKS = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if loop.last and message.role == 'assistant' %}<think></think>{% endif %}{{ message.content }}\
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


EVERYTHING = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}{{ message | tojson }}{{ message.content is defined }}\
{% if message.role == 'assistant' %}{% generation %}said{% endgeneration %}{% endif %}
{% endfor %}"""
"""Writes all that it receives."""


WORDS = (
    "who are you? I am a bot. what is <b>2 + 2</b>? four, 4 naïve 🙂 {} \n assistant user tools "
)


TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & ü"}}]


def save_tokenizer(directory, template, **options):
    """A byte-level BPE with the tokens of CHATML, as transformers writes it to disk."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=options.pop("trim", False))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator([WORDS] * 3, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", bos_token="<s>", pad_token="<|endoftext|>"
    )
    fast.chat_template = template
    fast.save_pretrained(directory, **options)
    return fast


def bpe_file():
    return tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).to_str().encode()
