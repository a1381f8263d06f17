"""Text sources and packing: nothing lost, nothing invented, no label across a document's boundary."""

import json

import pytest
import torch

from regraft.data.corpus import embedded_documents
from regraft.data.packing import IGNORE, PackedText
from regraft.data.synthetic import TASKS
from regraft.data.text import documents
from regraft.errors import UserError
from regraft.recipes.schema import DataConfig


def test_the_embedded_corpus_is_there_and_split():
    train, heldout = embedded_documents("train"), embedded_documents("heldout")
    assert sum(map(len, train)) > 1_000_000
    assert sum(map(len, heldout)) > 100_000
    assert not set(train) & set(heldout)
    assert train == embedded_documents("train")


def test_local_files_by_kind(tmp_path):
    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}\n')
    found = list(documents(DataConfig(source=str(tmp_path / "*"), split="all")))
    assert found == ["one text", "two", "three"]


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["x", "y"]}), tmp_path / "c.parquet")
    source = str(tmp_path / "c.parquet")
    assert list(documents(DataConfig(source=source, split="all", field="body"))) == ["x", "y"]
    with pytest.raises(UserError, match="no field 'text'"):
        list(documents(DataConfig(source=source, split="all")))


def test_train_and_heldout_share_a_local_file_without_overlap(tmp_path):
    rows = [json.dumps({"text": f"document number {i}"}) for i in range(200)]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    source = str(tmp_path / "d.jsonl")
    train, heldout = (list(documents(DataConfig(source=source, split=s))) for s in ("train", "heldout"))
    assert len(train) + len(heldout) == 200 and 5 < len(heldout) < 50
    assert not set(train) & set(heldout)


@pytest.mark.parametrize(
    "content,told",
    [
        ("{bad", r"not JSON"),
        ("[1]", "not a JSON object"),
        ('{"txt": "x"}', "no field 'text'"),
        ('{"text": 3}', "holds int"),
    ],
)
def test_a_bad_row_is_told_with_its_line(tmp_path, content, told):
    (tmp_path / "e.jsonl").write_text('{"text": "fine"}\n' + content + "\n")
    with pytest.raises(UserError, match=told) as caught:
        list(documents(DataConfig(source=str(tmp_path / "e.jsonl"), split="all")))
    assert caught.value.where.endswith("e.jsonl:2")


def test_missing_text_and_unknown_kinds(tmp_path):
    with pytest.raises(UserError, match="no text at"):
        list(documents(DataConfig(source=str(tmp_path / "none.txt"))))
    (tmp_path / "f.csv").write_text("a,b")
    with pytest.raises(UserError, match="unknown kind"):
        list(documents(DataConfig(source=str(tmp_path / "f.csv"))))
    with pytest.raises(UserError, match="no split 'trian'"):
        list(documents(DataConfig(split="trian")))


def test_a_hub_data_set_that_cannot_be_had_is_one_clear_error(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="does not load"):
        list(documents(DataConfig(source="hub:nobody/nothing-at-all")))


def packed(tiny_tokenizer, texts, seq_len=8, **options):
    return PackedText(texts, tiny_tokenizer, seq_len, **options)


def test_three_documents_three_separators_and_all_tokens(tiny_tokenizer):
    texts = ["abcde", "fgh", "ijklmn"]
    rows = packed(tiny_tokenizer, texts)
    assert rows.tokens_per_epoch == sum(map(len, texts)) + 3
    ids = torch.cat([rows.row(i)[0] for i in range(2)])
    eos, bos = tiny_tokenizer.eos_token_id, tiny_tokenizer.bos_token_id
    assert (ids == bos).sum() == 0
    assert 2 <= (ids == eos).sum() <= 3
    one_epoch = torch.cat([rows.row(i)[0] for i in range(17)])[: rows.tokens_per_epoch]
    assert (one_epoch == eos).sum() == 3
    decoded = tiny_tokenizer.decode(one_epoch[one_epoch > 3].tolist())
    assert sorted(decoded) == sorted("".join(texts))


def test_no_label_crosses_a_boundary_and_positions_restart(tiny_tokenizer):
    rows = packed(tiny_tokenizer, ["abcde", "fgh", "ijklmnopqrstuvw"], seq_len=16)
    for number in range(12):
        ids, positions, labels = rows.row(number)
        starts = positions == 0
        assert bool(starts[0])
        assert (labels[starts] == IGNORE).all()
        assert torch.equal(labels[~starts], ids[~starts])
        # what comes before a start within a row is the separator of the document before
        for at in starts.nonzero().flatten().tolist():
            if at:
                assert ids[at - 1] == tiny_tokenizer.eos_token_id
        assert (positions.diff()[~starts[1:]] == 1).all()


def test_an_end_of_document_is_a_label_even_if_it_is_the_pad_token(tiny_tokenizer):
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    _, _, labels = packed(tokenizer, ["abc", "defg", "hij"], seq_len=12).row(0)
    assert (labels == tokenizer.eos_token_id).sum() >= 2


def test_rows_do_not_depend_on_how_they_are_reached(tiny_tokenizer):
    texts = [f"text number {i} with some words" for i in range(30)]
    a, b = packed(tiny_tokenizer, texts, 32), packed(tiny_tokenizer, texts, 32)
    late = b.row(70)
    for number in range(71):
        row = a.row(number)
    assert all(torch.equal(x, y) for x, y in zip(row, late, strict=True))
    assert a.fingerprint() == b.fingerprint() != packed(tiny_tokenizer, texts, 32, seed=1).fingerprint()
    batch = a.batch(3, 2, stride=5)
    assert torch.equal(batch.input_ids[1], a.row(8)[0])


def test_too_little_text_is_refused(tiny_tokenizer):
    with pytest.raises(UserError, match="one row needs 512"):
        packed(tiny_tokenizer, ["short"], seq_len=512)


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("length", [300, 512, 777])
def test_recall_items_are_exact_and_deterministic(tiny_tokenizer, task, length):
    haystack = tiny_tokenizer(" ".join(f"item {i} of many" for i in range(200)))["input_ids"]
    item = TASKS[task].make(tiny_tokenizer, haystack, length, 7)
    assert item.ids.numel() == length
    assert torch.equal(item.ids, TASKS[task].make(tiny_tokenizer, haystack, length, 7).ids)
    assert not torch.equal(item.ids, TASKS[task].make(tiny_tokenizer, haystack, length, 8).ids)
    assert item.answers and all(0 < p < length for answer in item.answers for p in answer)
    text = tiny_tokenizer.decode(item.ids.tolist())
    for answer in item.answers:
        said = tiny_tokenizer.decode(item.ids[answer].tolist()).strip()
        assert text.count(said) >= 2, "an answer must stand in the context before it is asked for"


def test_a_recall_task_without_room_says_so(tiny_tokenizer):
    with pytest.raises(ValueError, match="needs"):
        TASKS["passkey"].make(tiny_tokenizer, [5] * 100, 20, 0)
