"""Chat templates: known prompts from known conversations, and refusals that name what is wrong."""

import json
import re
from datetime import datetime

import pytest

from jhybrid.chat_template import ChatTemplate
from jhybrid.errors import ConfigError, RequestError
from jhybrid.tokenizer import ByteTokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = false %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system %}"
    "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi <b>&</b> 你好"}
TURNS = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": " Yes. "}, USER]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})


def test_chatml():
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&</b> 你好<|im_end|>\n"
    assert template(CHATML).render(TURNS[:2], add_generation_prompt=False) == head
    assert template(CHATML).render(TURNS[:2]) == head + "<|im_start|>assistant\n"


def test_llama2_with_bos_and_system():
    assert template(LLAMA2).render(TURNS) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi <b>&</b> 你好 [/INST] Yes. </s><s>[INST] Hi <b>&</b> 你好 [/INST]"
    )


def test_functions_that_templates_use():
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% set ns = namespace(count=0) %}{% set ns.count = ns.count + 2 %}{{ ns.count }}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{{ strftime_now('%Y') }}{{ tools | tojson(indent=2) }}"
        "{% endfor %}{{ enable_thinking }}{{ missing }}"
    )
    tools = [{"name": "f", "description": "<é>"}]
    before = datetime.now().year
    text = template(source).render([USER, USER], tools=tools, enable_thinking=False)
    years = {
        f"2{json.dumps(USER, ensure_ascii=False)}{year}{json.dumps(tools, ensure_ascii=False, indent=2)}False"
        for year in (before, datetime.now().year)
    }
    assert text in years


def test_tool_template_is_taken_for_tools():
    both = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert both.render([USER]) == "plain"
    assert both.render([USER], tools=[{"name": "f"}]) == "tools"


def test_of_a_tokenizer_the_prompt_has_one_bos():
    tokenizer = ByteTokenizer(chat_template="{{ bos_token }}{{ messages[0].content }}")
    prompt = ChatTemplate.of(tokenizer).render([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(prompt, add_special_tokens=False) == tokenizer.encode(prompt) == [256, 104, 105]


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (LLAMA2, [USER, USER], "messages: the chat template refused them: Conversation roles must alternate"),
        (CHATML, [{"role": "user", "content": None}], "messages: the chat template failed (TypeError"),
        (CHATML, [], "messages: is empty"),
        (CHATML, [{"content": "x"}], "messages[0].role: must be a string, got None"),
        (CHATML, [USER, "x"], "messages[1]: must be an object"),
        ("{{ messages[0].__class__.__mro__ }}", [USER], "refused"),
        ("{{ messages.append(1) }}", [USER], "refused"),
        ("{% set ns = namespace() %}{% set ns.__x = 1 %}", [USER], "underscore"),
        ("{% for i in range(1000000) %}x{% endfor %}", [USER], "Range too big"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", [USER], "grows beyond"),
        ("{{ 1 / 0 }}", [USER], "ZeroDivisionError"),
    ],
)
def test_refusals_name_the_field(source: str, messages: list, message: str):
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        template(source).render(messages)
    assert caught.value.field.startswith("messages")


def test_broken_template_is_a_config_error():
    with pytest.raises(ConfigError, match="chat_template: template 'default' is no valid Jinja: line 2"):
        template("x\n{% for %}")


def test_model_without_template():
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate({}, {}).render([USER])
