"""Journal: what was written is there after a kill, what was half written is not."""

import os
import resource
from pathlib import Path

import pytest

from jhybrid.errors import ConfigError, RequestError
from jhybrid.evaluate.documents import read_documents
from jhybrid.evaluate.journal import Journal


def test_entries_survive_and_a_torn_line_is_dropped(tmp_path: Path):
    path = tmp_path / "deep" / "run.jsonl"
    with Journal(path, {"model": "a"}) as journal:
        journal.append({"n": 1})
        journal.append({"n": 2})
    path.write_bytes(path.read_bytes()[:-3])
    with Journal(path, {"model": "a"}) as journal:
        assert journal.entries == [{"n": 1}]
        journal.append({"n": 3})
    with Journal(path, {"model": "a"}) as journal:
        assert journal.entries == [{"n": 1}, {"n": 3}]
        journal.remove()
    assert not path.exists()


def test_a_torn_first_line_begins_anew(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"mod')
    with Journal(path, {"model": "a"}) as journal:
        journal.append({"n": 1})
    with Journal(path, {"model": "a"}) as journal:
        assert journal.entries == [{"n": 1}]


def test_another_run_s_journal_is_refused(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    Journal(path, {"model": "a", "length": 3}).close()
    with pytest.raises(ConfigError, match=r"is of another run \(length, model differ\)"):
        Journal(path, {"model": "b"})
    path.write_text("To be, or not to be\n")
    with pytest.raises(ConfigError, match="is no journal"):
        Journal(path, {"model": "a"})
    assert path.read_text() == "To be, or not to be\n"
    for content in ("To be, or not to be", '{"model": "b'):
        path.write_text(content)
        with pytest.raises(ConfigError, match="is no journal"):
            Journal(path, {"model": "a"})
        assert path.read_text() == content


def test_what_cannot_be_written_is_said_with_the_field_and_kept(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^output: /proc/none/run.jsonl cannot be written: .*; make room or name"):
        Journal(Path("/proc/none/run.jsonl"), {"model": "a"}, "output")
    path = tmp_path / "run.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, {"model": "a"}, "output") as journal:
        journal.append({"n": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
        try:
            with pytest.raises(ConfigError, match=r"output: .*cannot be written"):
                journal.append({"n": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert journal.entries == [{"n": 1}]
    with Journal(path, {"model": "a"}, "output") as journal:
        assert journal.entries == [{"n": 1}]


def test_one_run_at_a_time(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    with Journal(path, {"model": "a"}), pytest.raises(ConfigError, match="journal: another run is writing"):
        Journal(path, {"model": "a"})
    Journal(path, {"model": "a"}).close()


def test_pipes_and_devices_are_no_journals(tmp_path: Path):
    """Reading one may never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/full"), tmp_path):
        with pytest.raises(ConfigError, match=r"output: .* is no regular file"):
            Journal(path, {"model": "a"}, "output")


def test_numbers_and_nesting_that_python_does_not_read(tmp_path: Path):
    for text in ("9" * 5000, "[" * 200_000):
        (tmp_path / "run.jsonl").write_text(text + "\n")
        with pytest.raises(ConfigError, match="is no journal"):
            Journal(tmp_path / "run.jsonl", {"model": "a"})
        (tmp_path / "texts.jsonl").write_text(f'{{"text": "a"}}\n{text}\n')
        with pytest.raises(RequestError, match="line 2 is no JSON"):
            read_documents(tmp_path / "texts.jsonl")
