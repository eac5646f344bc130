"""The corpus: cleaning, the split, scenes, tokenizer and windows."""

import tarfile

import numpy as np
import pytest

from jhybrid.errors import ConfigError
from jhybrid.train.text import (
    BOS_ID,
    EOS_ID,
    Windows,
    clean,
    encode,
    line_starts,
    read_corpus,
    scenes,
    token_stream,
    train_tokenizer,
)

PLAY = (
    "THE PLAY\n\nby William Shakespeare\n\n\n\nACT I.\n\nSCENE I. A  room.\n\n  KING.\nWhat news?   \n"
    + "Speak, man!\n" * 30
)
PLAY += "\nSCENE II. A field.\n\nFOOL.\nNone, sir; 'tis caf\xe9-quiet.\n"


@pytest.fixture
def corpus_dir(tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}_gut.txt").write_text(f"{name.upper()} {PLAY}")
    (tmp_path / "one_folio.txt").write_text("Loue and vertue.")
    return tmp_path


def test_split_is_disjoint_and_complete(corpus_dir):
    corpus = read_corpus(corpus_dir, "*_gut.txt", ("two_gut",))
    assert set(corpus.training) == {"one_gut", "three_gut"}
    assert set(corpus.heldout) == {"two_gut"}
    assert "TWO" in corpus.heldout_text
    assert not any("TWO" in text for text in corpus.training.values())


def test_archive_equals_directory(corpus_dir, tmp_path_factory):
    archive = tmp_path_factory.mktemp("sdist") / "texts.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(corpus_dir, arcname="texts-1.0")
    assert read_corpus(archive, "texts-1.0/*_gut.txt", ("two_gut",)) == read_corpus(
        corpus_dir, "*_gut.txt", ("two_gut",)
    )


@pytest.mark.parametrize(
    ("heldout", "named"), [((), "nothing"), (("four",), "four"), (("one_gut", "two_gut", "three_gut"), "every work")]
)
def test_impossible_splits_are_refused(corpus_dir, heldout, named):
    with pytest.raises(ConfigError, match=f"heldout.*{named}"):
        read_corpus(corpus_dir, "*_gut.txt", heldout)


def test_absent_corpora_are_refused(corpus_dir):
    with pytest.raises(ConfigError, match="does not exist"):
        read_corpus(corpus_dir / "none", "*", ("one",))
    with pytest.raises(ConfigError, match=r"\*\.md"):
        read_corpus(corpus_dir, "*.md", ("one",))


def test_clean_keeps_words_and_normalises_space():
    text = clean("\ufeffA \r\nby William Shakespeare\r\n\r\n\r\n\r\n  b\tc   d\n*****\ne  \n\n")
    assert text == "A\n\nb c d\n\ne\n"
    assert clean(text) == text


def test_latin_1_files_are_read(tmp_path):
    (tmp_path / "a.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "b.txt").write_text("x")
    assert read_corpus(tmp_path, "*.txt", ("b",)).training == {"a": "caf\xe9\n"}


def test_scenes_join_to_the_text():
    text = clean(PLAY)
    pieces = scenes(text)
    assert "".join(pieces) == text
    assert len(pieces) == 2
    assert pieces[1].startswith("SCENE II.")


def test_tokenizer_gives_text_back_and_leads_with_bos():
    tokenizer = train_tokenizer([PLAY], 300)
    assert tokenizer.get_vocab_size() == 300
    other = "Unseen: \u00e9\u4e16 \n\n\n 12"
    assert tokenizer.decode(encode(tokenizer, other).tolist()) == other
    assert tokenizer.encode("What news?").ids[0] == BOS_ID
    assert BOS_ID not in encode(tokenizer, PLAY)


def windows(seed: int = 3, batch: int = 4, length: int = 16):
    tokenizer = train_tokenizer([PLAY], 300)
    stream = token_stream(tokenizer, {"a": clean(PLAY), "b": clean(PLAY * 2)})
    starts = line_starts(tokenizer, stream)
    return tokenizer, stream, starts, Windows(stream, starts, batch, length, seed)


def test_windows_start_at_lines_and_lie_in_the_stream():
    tokenizer, stream, starts, cut = windows()
    assert (stream == EOS_ID).sum() == len(scenes(clean(PLAY))) + len(scenes(clean(PLAY * 2)))
    texts = {tuple(stream[s : s + 16]) for s in starts}
    for step in range(3 * cut.per_epoch):
        rows = cut.batch(step)
        assert rows.shape == (4, 17)
        assert (rows[:, 0] == BOS_ID).all()
        assert all(tuple(row) in texts for row in rows[:, 1:])
    before = {tokenizer.decode([int(stream[s - 1])])[-1:] for s in starts if s and stream[s - 1] != EOS_ID}
    assert before == {"\n"}


def test_windows_depend_on_seed_and_step_alone():
    _, _, _, first = windows()
    _, _, _, again = windows()
    late = 2 * first.per_epoch + 1
    sequence = [first.batch(step) for step in range(late + 1)]
    np.testing.assert_array_equal(again.batch(late), sequence[late])
    assert not np.array_equal(sequence[0], sequence[first.per_epoch])
    _, _, _, other = windows(seed=4)
    assert not np.array_equal(other.batch(0), sequence[0])


def test_a_corpus_below_one_batch_is_refused():
    with pytest.raises(ConfigError, match="less than one batch"):
        windows(batch=400)
