"""Chat templates as models carry them, a tokenizer that has one, and messages."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedTokenizerFast

from support.tiny_models import byte_tokenizer

LLAMA = """{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>

{{ m['content'] | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""
QWEN = """{%- for m in messages %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
GEMMA = """{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<turn>' + m.role + '\\n' + m.content + '<end>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>model\\n' }}{% endif %}"""
R1 = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n"
BOOK = "Call me Ishmael. " * 20


def tokenizer(template: Any, **special: str) -> PreTrainedTokenizerFast:
    made = copy.deepcopy(byte_tokenizer())
    made.chat_template = template
    made.add_special_tokens(dict(special))
    return made


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
