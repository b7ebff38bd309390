"""Templates render as the model expects, escape nothing, and can reach nothing."""

import pytest

from baton.errors import BatonError, Reason
from baton.model.errors import ModelError
from baton.model.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def test_blocks_are_trimmed_and_loop_controls_work() -> None:
    text = (
        "{% for m in messages %}\n    {% if m.content == 'stop' %}\n{% break %}\n    {% endif %}\n"
        "{{ m.content }}|\n{% endfor %}"
    )
    messages = [{"role": "user", "content": c} for c in ("a", "b", "stop", "c")]
    assert ChatTemplate(text).render(messages) == "a|\nb|\n"


def test_null_content_reads_as_empty() -> None:
    template = ChatTemplate("{{ messages[0].content + '.' }}{{ messages[1].content + '.' }}")
    assert template.render([{"role": "assistant", "content": None}, {"role": "user"}]) == ".."


def test_tojson_is_for_models_not_for_html() -> None:
    template = ChatTemplate("{{ messages[0].content | tojson }}")
    assert template.render([{"role": "user", "content": "<a & 'é'>"}]) == "\"<a & 'é'>\""


def test_names_of_the_model_are_there_and_cannot_be_replaced() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}{{ x }}{{ add_generation_prompt }}", bos_token="<s>")
    assert template.render(USER, variables={"x": 7, "bos_token": "no", "messages": []}) == "<s>17True"


def test_strftime_now_and_generation_blocks() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') | int > 2000 }}{% generation %}x{% endgeneration %}")
    assert template.render(USER) == "Truex"


def test_a_refusal_of_the_template_is_the_clients_fault() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BatonError, match="roles must alternate") as caught:
        template.render(USER)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
    ],
)
def test_reaching_out_or_failing_is_an_error_not_a_crash(text: str) -> None:
    with pytest.raises(BatonError) as caught:
        ChatTemplate(text).render(USER)
    assert caught.value.reason is Reason.INVALID_REQUEST


def test_no_template_and_a_broken_one() -> None:
    with pytest.raises(BatonError, match="no chat template"):
        ChatTemplate("").render(USER)
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_digest_is_of_the_text() -> None:
    assert ChatTemplate("a").digest == ChatTemplate("a").digest != ChatTemplate("b").digest
