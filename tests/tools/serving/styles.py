"""Chat templates in the styles of twenty families, written out by hand, with the special tokens that each uses."""

from typing import NamedTuple


class Style(NamedTuple):
    template: str
    special: tuple[str, ...]  # bos, eos, then others


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{%- set system_message = false %}{% endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if loop.index0 == 0 and system_message != false %}
{%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{% set role = 'user' %}
{% elif message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
PHI_3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] +
'<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}
{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
PHI_4 = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}
{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- endfor %}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
COMMAND_R = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{%- set system_message = false %}{% endif %}{% if system_message != false %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- for message in loop_messages %}{% set content = message['content'] %}{% if message['role'] == 'user' %}
{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
GRANITE = """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}{%- else %}
{%- set system_message = "Today's Date: " + strftime_now('%Y') + "." %}{%- set loop_messages = messages %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- for message in loop_messages %}
{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
{%- endfor %}"""
SMOLLM = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}{% generation %}
{{- message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}
{{- '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
VICUNA = """{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}
{%- elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}
{%- else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""
OPENCHAT = (
    "{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message['role'].title() + ': ' + "
    "message['content'] + '<|end_of_turn|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}"
)
FALCON = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ message['role'].capitalize() + ': ' + message['content'].strip() }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}"
)
OLMO = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' +
message['content'] + '\\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' %}{% if not loop.last %}
{{- '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}{% else %}
{{- '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
YI = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- macro turn(role, content) -%}<|im_start|>{{ role }}
{{ content }}<|im_end|>
{% endmacro -%}
{%- for message in messages %}{{ turn(message.role, message.content) }}{% endfor -%}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
EXAONE = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}
{{- '[|system|][|endofturn|]\\n' }}{% endif %}{{ '[|' + message['role'] + '|]' + message['content'] }}
{%- if message['role'] == 'user' %}{{ '\\n' }}{% else %}{{ '[|endofturn|]\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"""
STARCODER = """{%- set names = {'user': 'Instruction', 'assistant': 'Response', 'system': 'System'} -%}
{{ bos_token }}{%- for message in messages %}
{%- if message.content == '' %}{% continue %}{% endif %}
{{- '### ' ~ names.get(message.role, message['role']) ~ '\\n' ~ message.content ~ '\\n\\n' }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}{{ '### Response\\n' if add_generation_prompt }}"""
INTERNLM = """{{ bos_token }}{% for message in messages | rejectattr('content', 'equalto', '') %}
{%- for line in message.content.split('\\n') %}
{%- if loop.index > 40 %}{% break %}{% endif %}
{{- ('<|im_start|>' ~ message.role ~ '\\n' if loop.first else '\\n') ~ line }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

IM = ("<|im_start|>", "<|im_end|>")
TAGS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
STYLES = {
    "chatml": Style(CHATML, ("<|endoftext|>", "<|im_end|>", "<|im_start|>")),
    "llama-2": Style(LLAMA_2, ("<s>", "</s>")),
    "llama-3": Style(LLAMA_3, ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")),
    "mistral": Style(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]")),
    "gemma": Style(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    "phi-3": Style(PHI_3, ("<s>", "<|endoftext|>", *TAGS)),
    "phi-4": Style(PHI_4, ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|im_sep|>")),
    "zephyr": Style(ZEPHYR, ("<s>", "</s>")),
    "deepseek": Style(DEEPSEEK, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")),
    "qwen": Style(QWEN, ("<|endoftext|>", "<|im_end|>", "<|im_start|>")),
    "command-r": Style(
        COMMAND_R,
        ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    ),
    "granite": Style(GRANITE, ("<|end_of_text|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>")),
    "smollm": Style(SMOLLM, ("<|endoftext|>", "<|im_end|>", "<|im_start|>")),
    "vicuna": Style(VICUNA, ("<s>", "</s>")),
    "openchat": Style(OPENCHAT, ("<s>", "<|end_of_turn|>")),
    "falcon": Style(FALCON, (">>TITLE<<", "<|endoftext|>")),
    "olmo": Style(OLMO, ("<|endoftext|>", "<|endoftext|>", *TAGS)),
    "yi": Style(YI, ("<|startoftext|>", "<|endoftext|>", *IM)),
    "exaone": Style(EXAONE, ("[BOS]", "[|endofturn|]")),
    "starcoder": Style(STARCODER, ("<|endoftext|>", "<|endoftext|>")),
    "internlm": Style(INTERNLM, ("<s>", "</s>", *IM)),
}
