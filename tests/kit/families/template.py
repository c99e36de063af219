"""Chat templates: ChatML, with a family's own text where a message has a picture, a video or a sound."""

HEAD = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
"""
TAIL = """\
{%- elif 'text' in part -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def chatml(**placeholders: str) -> str:
    """A template that writes, for a part of the modality that a keyword names, that keyword's text."""
    branches = [
        f"if part.type == '{modality}' or '{modality}_url' in part -%}}\n{text}\n"
        for modality, text in placeholders.items()
    ]
    return HEAD + "{%- " + "{%- el".join(branches) + TAIL
