"""Tokenizers: ids and text agree with the `tokenizers` library, and special tokens with the configuration files."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jhybrid.errors import ConfigError
from jhybrid.tokenizer import ByteTokenizer, load_tokenizer, read_eos_token_ids
from tests.tokenizer_fixtures import KINDS, byte_fallback, byte_level_bpe, make_tokenizer, words, write_files

TEXTS = ["the dog", "  the dogs,  dog ", "dš 你好 😀 é", "", "\n\t the", "zebra <s> the </s> dog"]


def load(directory: Path):
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level_bpe, byte_fallback, words])
@pytest.mark.parametrize("skip", [True, False])
def test_ids_and_text_equal_the_library(tmp_path: Path, make, text: str, skip: bool):
    native = make()
    ours = load(write_files(tmp_path, native))
    ids = ours.encode(text)
    assert ids == native.encode(text).ids
    assert ours.decode(ids, skip_special_tokens=skip) == native.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
@pytest.mark.parametrize("kind", ["byte", "byte_files", "byte_level_bpe", "byte_fallback"])
def test_any_text_comes_back(tmp_path: Path, kind: str, text: str):
    tokenizer = make_tokenizer(kind, tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 330), max_size=12), skip=st.booleans())
def test_any_tokens_decode_as_the_library_does(tmp_path_factory, ids: list[int], skip: bool):
    native = byte_level_bpe()
    tokenizer = load(write_files(tmp_path_factory.mktemp("any"), native))
    assert tokenizer.decode(ids, skip) == native.decode(ids, skip_special_tokens=skip)


def test_byte_tokenizer_and_its_files_are_one_tokenizer(tmp_path: Path):
    ours = ByteTokenizer(chat_template="{{ bos_token }}x")
    ours.save(tmp_path)
    theirs = load(tmp_path)
    for text in [*TEXTS, "<bos>hi<eos>", "a\ud800b"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))
    for name in ("vocab_size", "bos_token_id", "eos_token_ids", "chat_templates", "named_tokens", "longest"):
        expected = getattr(ours, name)
        found = getattr(theirs, name)
        assert found == expected, name
    assert [t for t in range(258) if theirs.is_special(t)] == [256, 257]


def test_long_texts_hold_up_no_other_thread(tmp_path: Path):
    ByteTokenizer().save(tmp_path)
    tokenizer = load(tmp_path)
    text, found, waits = "to be, or not to be é " * 20_000, [], []
    thread = threading.Thread(target=lambda: found.append(tokenizer.encode(text)))
    thread.start()
    while thread.is_alive():
        began = time.perf_counter()
        time.sleep(0.001)
        waits.append(time.perf_counter() - began)
    thread.join()
    assert found == [ByteTokenizer().encode(text)]
    assert max(waits) < sum(waits) / 2, f"{max(waits):.3f} s of {sum(waits):.3f} s at once"


def test_padding_ids_are_no_text():
    tokenizer = ByteTokenizer(300)
    assert tokenizer.decode([104, 299, 105, 258], skip_special_tokens=False) == "hi"


@pytest.mark.parametrize(
    ("template_adds", "config", "leads"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"add_bos_token": True}, True),
        (True, {"add_bos_token": False}, False),
        (True, {"add_bos_token": True}, True),
    ],
)
def test_bos_leads_as_the_configuration_says_and_once(tmp_path: Path, template_adds: bool, config: dict, leads: bool):
    tokenizer = load(write_files(tmp_path, byte_level_bpe(bos=template_adds), **config))
    bos = tokenizer.bos_token_id
    bare = tokenizer.encode("the dog", add_special_tokens=False)
    assert bos is not None
    assert bos not in bare
    assert tokenizer.encode("the dog") == ([bos] if leads else []) + bare
    assert tokenizer.encode("<s>the dog") == [bos, *bare]
    assert tokenizer.encode("") == ([bos] if leads else [])


def test_a_saved_training_length_does_not_cut_prompts(tmp_path: Path):
    native = byte_level_bpe()
    native.enable_truncation(4)
    native.enable_padding(length=64)
    tokenizer = load(write_files(tmp_path, native))
    text = "quick brown fox " * 5
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 2


def test_every_eos_id_is_found(tmp_path: Path):
    write_files(tmp_path, byte_level_bpe())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load(tmp_path).eos_token_ids == (9, 1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 7]}))
    assert load(tmp_path).eos_token_ids == (7, 8, 1)
    assert read_eos_token_ids(tmp_path) == (7, 8)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    for section in ("text_config", "llm_config"):
        (tmp_path / "config.json").write_text(json.dumps({section: {"eos_token_id": 5}}))
        assert read_eos_token_ids(tmp_path) == (5,)


def test_eos_ids_that_the_model_does_not_have_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 99_999_999]}))
    assert read_eos_token_ids(tmp_path, 64, 64) == (7,)
    assert "eos_token_id 99999999, 64 is none of the model's 64 tokens" in caplog.text


def test_files_nested_too_deeply_are_refused(tmp_path: Path):
    write_files(tmp_path, byte_level_bpe())
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("[" * 200_000)
        with pytest.raises(ConfigError, match=rf"^{name}: .*is no JSON"):
            load(tmp_path)


def test_templates_and_names_come_from_all_files(tmp_path: Path):
    templates = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}]
    write_files(tmp_path, byte_level_bpe(), chat_template=templates)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>", "bos_token": "<other>"}))
    assert load(tmp_path).chat_templates == {"default": "old", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = load(tmp_path)
    assert tokenizer.chat_templates == {"default": "new", "tool_use": "tools"}
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [{"name": "default"}],
            'chat_template[0] is {"name": "default"}; it must be an object with a text as \'template\'',
        ),
        (
            [{"name": "a", "template": "b"}, "x"],
            "chat_template[1] is \"x\"; it must be an object with a text as 'name'",
        ),
        (5, "chat_template is 5; it must be a text"),
        ({"default": "x"}, 'chat_template is {"default": "x"}; it must be a text'),
    ],
)
def test_a_chat_template_of_another_form_is_refused(tmp_path: Path, given: object, message: str):
    write_files(tmp_path, byte_level_bpe(), chat_template=given)
    with pytest.raises(ConfigError, match=re.escape(f"tokenizer_config.json: {message}")):
        load(tmp_path)


def test_bytes_of_single_tokens(tmp_path: Path):
    tokenizer = load(write_files(tmp_path, byte_fallback()))
    the = tokenizer.encode("the", add_special_tokens=False)[0]
    assert tokenizer.token_bytes(the) == b" the"
    assert tokenizer.token_bytes(the, first=True) == b"the"
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert tokenizer.token_bytes(3 + 0x20) == b" "
    assert tokenizer.token_bytes(3 + 0x20, first=True) == b""
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_directory_without_tokenizer(tmp_path: Path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(ConfigError, match=r"tokenizer\.model.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_broken_files_are_named(tmp_path: Path):
    path = write_files(tmp_path, byte_level_bpe()) / "tokenizer.json"
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], b"", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            load_tokenizer(tmp_path)
    path.write_bytes(whole)
    write_files(tmp_path, byte_level_bpe(), bos_token="<nowhere>")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json.*<nowhere>"):
        load_tokenizer(tmp_path)


def test_byte_vocabulary_too_small():
    with pytest.raises(ConfigError, match="vocab_size: 257"):
        ByteTokenizer(257)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_stay_below_vocab_size(tmp_path: Path, kind: str):
    tokenizer = make_tokenizer(kind, tmp_path)
    assert all(0 <= token < tokenizer.vocab_size for text in TEXTS for token in tokenizer.encode(text))
