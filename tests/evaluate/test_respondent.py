"""Respondent: texts scored and answered as the harness's hf model does, against the toy's table."""

import pytest

from jhybrid.errors import ConfigError, RequestError, StepError
from jhybrid.evaluate.engines import OneEngine
from jhybrid.evaluate.respondent import Respondent, left_open, sampling_of
from jhybrid.request import SamplingParams
from tests.evaluate.toy_text import BOS, EOS, LetterTokenizer, by_hand, text_engine
from tests.toy_model import Fault, expected_tokens, toy_engine

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content | trim }}.\n{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
PICKY = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def respondent(tokenizer: LetterTokenizer | None = None, **options) -> Respondent:
    return Respondent(OneEngine(text_engine(tokenizer)[0]), **options)


def letters(text: str) -> list[int]:
    return LetterTokenizer().encode(text)


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("max_length", [9, 63])
def test_loglikelihoods_are_the_table_s(add_bos: bool, max_length: int):
    pairs = [
        ("to be ", "or not"),  # the space goes to the continuation
        ("to be", " or not"),
        ("a rose by any other name", " smells"),  # cut on the left in the short window
        ("to be o", "r"),
        ("", "to be"),
        ("to be", " or not"),
    ]
    answers = respondent(LetterTokenizer(add_bos), max_length=max_length).loglikelihoods(pairs)
    lead = [BOS] if add_bos else []
    for (context, continuation), answer in zip(pairs, answers, strict=True):
        after = letters(" or not" if continuation == "or not" else continuation)
        before = lead + letters(context.rstrip()) if context else [BOS]
        tokens = (before + after)[-(max_length + 1) :]
        assert (answer.total, answer.is_greedy) == by_hand(tokens, len(tokens) - len(after)), (context, continuation)
    assert answers[0] == answers[1] == answers[5]


def test_context_and_continuation_of_one_token_more_than_a_pass():
    asker = respondent(max_length=9)
    for context in range(1, 12):
        text = "abcdefghijklmn"[:context]
        [answer] = asker.loglikelihoods([(text, "xyz")])
        tokens = letters(text + "xyz")[-10:]
        assert (answer.total, answer.is_greedy) == by_hand(tokens, len(tokens) - 3), context
    with pytest.raises(RequestError, match="continuation: 10 tokens exceed the 9 of one pass"):
        asker.loglikelihoods([("a", "bcdefghijk")])


def test_an_empty_context_whose_continuation_begins_with_the_prefix():
    asker = respondent(prefix_token_id=letters("t")[0])
    [answer] = asker.loglikelihoods([("", "to be")])
    assert answer.total == by_hand(letters("to be"), 1)[0]
    for continuation in ("", "t"):
        with pytest.raises(RequestError, match="continuation: has no tokens"):
            asker.loglikelihoods([("", continuation)])
    [answer] = asker.loglikelihoods([(" ", "o be")])  # nothing but white space before it
    assert answer.total == by_hand(letters("t o be"), 1)[0]


@pytest.mark.parametrize("add_bos_token", [None, False, True])
def test_rolling_scores_what_the_tokenizer_gives(add_bos_token: bool | None):
    texts = ["the quick brown fox", "jumps", ""]
    totals = respondent(LetterTokenizer(add_bos=True), max_length=7, add_bos_token=add_bos_token).rolling(texts)
    for text, total in zip(texts, totals, strict=True):
        tokens = letters(text) if add_bos_token is False else [BOS, *letters(text)]
        expected = 0.0
        for at in range(len(tokens)):
            end = min((at // 7 + 1) * 7, len(tokens))
            history = [BOS, *tokens[:at]] if at < 7 else tokens[end - 8 : at]
            expected += by_hand([*history, tokens[at]], len(history))[0]
        assert total == pytest.approx(expected, rel=1e-12), text


def test_answers_are_greedy_cut_and_in_order():
    asker = respondent(max_length=30)
    tokenizer = LetterTokenizer()
    prompts = [(text, {"max_gen_toks": 12}) for text in ("to be", "a", "rose is a rose is a rose is a rose", "")]
    answers = asker.generate(prompts)
    for (context, _), answer in zip(prompts, answers, strict=True):
        tokens = letters(context)[-18:] or [BOS]  # room for 12 tokens is kept in the 30 of a pass
        expected = expected_tokens(tokens, SamplingParams(max_tokens=12, temperature=0.0))
        assert answer == tokenizer.decode(expected), context
    longest = max(answers, key=len)
    assert len(longest) > 3
    context = prompts[answers.index(longest)][0]
    [cut] = asker.generate([(context, {"max_gen_toks": 12, "until": ["", longest[2:4]]})])
    assert cut == longest[: longest.index(longest[2:4])]


def test_generation_options():
    assert sampling_of({}, 256) == SamplingParams(max_tokens=256, temperature=0.0, stop=[])
    assert sampling_of({"temperature": 0.5, "do_sample": False}, 9).temperature == 0.0
    assert sampling_of({"do_sample": True}, 9).temperature == 1.0
    given = {"until": "\n", "max_new_tokens": 7, "max_tokens": 8, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    assert sampling_of(given, 9) == SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, stop=["\n"])
    with pytest.raises(RequestError, match="num_beams: 4 is no generation option"):
        sampling_of({"num_beams": 4}, 9)
    with pytest.raises(RequestError, match="max_gen_toks: 30 leave no room"):
        respondent(max_length=30).generate([("a", {"max_gen_toks": 30})])


def test_a_failure_is_told():
    engine, runner = text_engine()
    runner.faults[0] = Fault("before")
    with pytest.raises(StepError, match="injected"):
        Respondent(OneEngine(engine)).generate([("a", {"max_gen_toks": 3})])
    with pytest.raises(ConfigError, match="no tokenizer"):
        Respondent(OneEngine(toy_engine(engine.config)[0]))


def test_sampled_runs_change_no_loglikelihood():
    asker = respondent(max_length=40)
    pair = ("to be", " or not")
    before = asker.loglikelihoods([pair])
    asker.generate([("to be or", {"max_gen_toks": 9, "do_sample": True, "temperature": 2.0, "seed": 3})])
    assert asker.loglikelihoods([pair]) == before


def test_chats():
    asker = respondent(LetterTokenizer(chat_template=TEMPLATE))
    messages = [{"role": "user", "content": " who is there "}, {"role": "assistant", "content": "nay "}]
    assert asker.chat(messages[:1]) == "user who is there.\nassistant "
    assert asker.chat(messages, add_generation_prompt=False) == "user who is there.\nassistant nay"
    picky = respondent(LetterTokenizer(chat_template=PICKY))
    system = [{"role": "system", "content": "be brief"}, *messages[:1]]
    assert asker.chat(system) == "system be brief.\nuser who is there.\nassistant "
    assert picky.chat(system) == "user who is there.\nassistant "
    with pytest.raises(RequestError, match="no chat template"):
        respondent().chat(messages)


def test_a_last_message_is_left_open_with_the_white_space_that_the_template_kept():
    assert left_open("assistant: nay ,\n", "nay ") == "assistant: nay "
    assert left_open("nay: nay,\n", " nay ") == "nay: nay"
    with pytest.raises(RequestError, match="changes the last message"):
        left_open("assistant: NAY", "nay")


def test_templates_by_name():
    tokenizer = LetterTokenizer(chat_template=TEMPLATE)
    tokenizer.chat_templates["short"] = "{{ messages[0].content }}"
    asker = respondent(tokenizer)
    assert asker.chat_template() == TEMPLATE
    assert asker.chat_template("short") == "{{ messages[0].content }}"
    assert asker.chat([{"role": "user", "content": "ay"}]) == "ay"
    with pytest.raises(ConfigError, match="'long' is not among those of this model: default, short"):
        asker.chat_template("long")


def test_eos_ends_the_prefix_where_there_is_no_bos():
    tokenizer = LetterTokenizer()
    tokenizer.bos_token_id = None
    [answer] = respondent(tokenizer).loglikelihoods([("", "to be")])
    assert answer.total == by_hand([EOS, *letters("to be")], 1)[0]
