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


# Templates with tools, in the documented structure of their families, shortened.

HERMES_TOOLS = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{%- set call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
CODER_TOOLS = """{%- for tool in tools or [] %}
{{- '<function><name>' + tool.function.name + '</name><description>' + tool.function.description }}
{{- '</description><parameters>' + (tool.function.parameters | tojson) + '</parameters></function>\\n' }}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}{{ value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA_TOOLS = """{{- bos_token }}
{%- if tools %}{{- '<|start|>system<|end|>\\n\\n<|python_tag|> is for code.' }}
{%- for tool in tools %}{{- '\\n\\n' }}{{- tool | tojson(indent=4) }}{%- endfor %}{{- '<|eot|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('This model calls one tool at a time!') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot|>' }}
{%- elif m.role == 'tool' %}{{- '<|start|>ipython<|end|>\\n\\n' + m.content + '<|eot|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|end|>\\n\\n' + (m.content | trim) + '<|eot|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"""
MISTRAL_TOOLS = """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.tool_calls %}
{%- for call in m.tool_calls %}
{%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('not of length 9') }}{%- endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{%- endfor %}{{- eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.tool_call_id + ' ' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}"""
GLM_TOOLS = """[gMASK]<sop>{%- if tools %}{{- '<|system|>\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}
{{- '</arg_value>' }}
{%- endfor %}{{- '\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
HARMONY_TOOLS = """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') }}
{{- '\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|># Tools\\n' }}
{%- for tool in tools %}
{{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + '\\n' }}
{%- endfor %}
{{- '<|end|>' }}{%- endif %}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set call = m.tool_calls[0].function %}{%- set ns.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}{{- '<|end|>' }}
{%- elif m.role == 'assistant' %}
{%- if m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
TEXT_ARGUMENTS = """{# <tool_call> </tool_call> #}
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for m in messages %}{{- m.role + ': ' + m.content }}
{%- for call in m.tool_calls or [] %}{{- call.function.name ~ call.function.arguments }}{%- endfor %}
{%- endfor %}"""
TOOL_TEMPLATES = {
    "hermes": HERMES_TOOLS,
    "coder": CODER_TOOLS,
    "llama": LLAMA_TOOLS,
    "mistral": MISTRAL_TOOLS,
    "glm": GLM_TOOLS,
    "harmony": HARMONY_TOOLS,
    "text arguments": TEXT_ARGUMENTS,
}
