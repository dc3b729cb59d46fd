"""Chat templates with the structure of the real families, in our own words.

What matters to a program is kept: where begin and end tokens stand, what is
cut off, how results of tools are shown, and what happens to earlier turns.
"""

import dataclasses

_CHATML_HEAD = (
  "{%- if messages[0].role == 'system' or tools %}"
  "{{- '<|im_start|>system\n' }}"
  "{%- if messages[0].role == 'system' %}{{- messages[0].content }}"
  "{%- else %}{{- 'DEFAULT' }}{%- endif %}"
  "{%- if tools %}{{- '\nFunctions in <tools></tools>:\n<tools>' }}"
  "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
  "{{- '\n</tools>\nCall with <tool_call></tool_call>.' }}{%- endif %}"
  "{{- '<|im_end|>\n' }}"
  "{%- endif %}"
)
# Results in a row share one turn of the user.
_CHATML_TOOL = (
  "{%- if message.role == 'tool' %}"
  "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
  "{{- '<|im_start|>user' }}{%- endif %}"
  "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
  "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
  "{{- '<|im_end|>\n' }}{%- endif %}"
)
_CHATML_TURN = "{{- '<|im_start|>' + message.role + '\n' }}"
_CHATML_TAIL = (
  "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

QWEN2 = (
  _CHATML_HEAD
  + "{%- for message in messages %}"
  + _CHATML_TOOL
  + "{%- elif message.role != 'system' or not loop.first %}"
  + _CHATML_TURN
  + "{{- message.content or '' }}"
  "{%- for call in message.tool_calls or [] %}"
  "{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
  "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}" + _CHATML_TAIL
)

# Thoughts are kept behind the user's last words, made up where there are none,
# and taken out of all answers before.
QWEN3 = (
  _CHATML_HEAD + "{%- set ns = namespace(last=0) %}"
  "{%- for message in messages %}"
  "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
  "{%- endfor %}"
  "{%- for message in messages %}"
  + _CHATML_TOOL
  + "{%- elif message.role == 'assistant' %}"
  "{%- set words = message.content %}{%- set thought = '' %}"
  "{%- if '</think>' in words %}"
  "{%- set thought = words.split('</think>')[0].split('<think>')[-1] %}"
  "{%- set words = words.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
  + _CHATML_TURN
  + "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
  "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
  "{{- words + '<|im_end|>\n' }}"
  "{%- elif message.role != 'system' or not loop.first %}"
  + _CHATML_TURN
  + "{{- message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
  + _CHATML_TAIL
)

SMOLLM2 = (
  "{% for message in messages %}"
  "{% if loop.first and message.role != 'system' %}"
  "{{ '<|im_start|>system\nDEFAULT<|im_end|>\n' }}{% endif %}"
  "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}"
  "{{ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_HEADER = "<|start_header_id|>' + {} + '<|end_header_id|>\n\n"
# Tools stand in the first words of the user; text is trimmed, results are JSON.
LLAMA3 = (
  "{{- bos_token }}"
  "{{- '"
  + _HEADER.format("'system'")
  + "Today: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}"
  "{%- for message in messages %}"
  "{%- if message.role in ['tool', 'ipython'] %}"
  "{{- '" + _HEADER.format("'ipython'") + "' }}"
  "{{- message.content | tojson }}{{- '<|eot_id|>' }}"
  "{%- else %}{{- '" + _HEADER.format("message.role") + "' }}"
  "{%- if tools and loop.first %}{{- 'Functions:' }}"
  "{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}"
  "{{- '\n\n' }}{%- endif %}"
  "{{- message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
  "{%- if add_generation_prompt %}{{- '"
  + _HEADER.format("'assistant'")
  + "' }}{%- endif %}"
)

GEMMA3 = (
  "{{ bos_token }}"
  "{%- for message in messages -%}"
  "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
  "{{ raise_exception('roles of user and assistant must alternate') }}"
  "{%- endif -%}"
  "{%- set role = 'model' if message.role == 'assistant' else message.role -%}"
  "{{ '<start_of_turn>' + role + '\n' + (message.content | trim) }}"
  "{{ '<end_of_turn>\n' }}{%- endfor -%}"
  "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)


@dataclasses.dataclass(frozen=True)
class Family:
  """A template and the special tokens that belong to it.

  Attributes:
    template: Jinja source.
    end: ends a turn.
    special: all special tokens, the begin token first.
    bos: texts begin with it.
    style: in which it calls tools.
  """

  template: str
  end: str
  special: tuple[str, ...]
  bos: bool
  style: str


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {
  "llama3": Family(
    LLAMA3, "<|eot_id|>", ("<|begin_of_text|>", *_LLAMA), True, "llama"
  ),
  "qwen2.5": Family(QWEN2, "<|im_end|>", _CHATML, False, "hermes"),
  "qwen3": Family(QWEN3, "<|im_end|>", _CHATML, False, "hermes"),
  "smollm2": Family(SMOLLM2, "<|im_end|>", _CHATML, False, "hermes"),
  "gemma3": Family(
    GEMMA3,
    "<end_of_turn>",
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    True,
    "gemma",
  ),
}
