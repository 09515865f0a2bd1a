"""The text: the same on every rank and in every run, dealt to data-parallel ranks, continued after a resume."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from cp_engine.errors import ConfigError, Problem
from cp_engine.hosts.torchtitan.text import sources
from cp_engine.hosts.torchtitan.text.rows import BEGIN, END, Rows, encode


def folder_of(tmp_path: Path, *files: list[dict[str, object]]) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number, records in enumerate(files):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def inputs(rows: Rows, count: int) -> list[list[int]]:
    return [row["input"].tolist() for row, _ in islice(rows, count)]


def problems(path: object, field: object = "text", **more: object) -> list[Problem]:
    return sources.check({"data": {"path": path, "field": field, **more}})


def test_built_in_text_is_a_megabyte_of_prose() -> None:
    texts = list(sources.documents(None, "text"))
    assert sum(map(len, texts)) > 500_000
    assert texts == list(sources.documents(None, "text"))


def test_check_accepts_the_built_in_text() -> None:
    assert problems(None) == []


@pytest.mark.quick
def test_rows_are_one_stream_cut_with_an_overlap_of_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [{"text": "abc"}, {"text": ""}], [{"text": "é" * 20}])
    stream = [token for text in ("abc", "", "é" * 20) for token in encode(text)] * 3
    for number, (row, labels) in enumerate(
        islice(Rows(path=str(folder), field="text", sequence=7, rank=0, world=1), 12)
    ):
        assert row["input"].tolist() == stream[number * 7 : number * 7 + 7]
        assert labels.tolist() == stream[number * 7 + 1 : number * 7 + 8]


def test_encode_marks_both_ends() -> None:
    assert encode("aé") == [BEGIN, 97, 195, 169, END]


def test_data_parallel_ranks_share_the_rows_out() -> None:
    whole = inputs(Rows(path=None, field="text", sequence=50, rank=0, world=1), 12)
    for rank in range(3):
        assert inputs(Rows(path=None, field="text", sequence=50, rank=rank, world=3), 4) == whole[rank::3]


def test_loader_workers_share_the_rows_out() -> None:
    rows = Rows(path=None, field="text", sequence=50, rank=1, world=2)
    loaded = [row["input"][0].tolist() for row, _ in islice(DataLoader(rows, num_workers=2), 8)]
    assert sorted(loaded) == sorted(inputs(rows, 8))


@pytest.mark.parametrize("taken", [0, 1, 5, 9, 23])
def test_rows_continue_where_the_state_stopped(tmp_path: Path, taken: int) -> None:
    folder = folder_of(tmp_path, [{"text": "abcdefghij"}, {"text": "k"}], [{"text": "l" * 30}])
    first = Rows(path=str(folder), field="text", sequence=8, rank=0, world=1)
    reader = iter(first)
    for _ in range(taken):
        next(reader)
    second = Rows(path=str(folder), field="text", sequence=8, rank=0, world=1)
    second.load_state_dict(first.state_dict())
    expected = [row["input"].tolist() for row, _ in islice(reader, 15)]
    assert inputs(second, 15) == expected


def test_rows_continue_on_a_second_rank() -> None:
    reader = iter(whole := Rows(path=None, field="text", sequence=64, rank=1, world=2))
    for _ in range(7):
        next(reader)
    resumed = Rows(path=None, field="text", sequence=64, rank=1, world=2)
    resumed.load_state_dict(whole.state_dict())
    assert torch.equal(next(iter(resumed))[0]["input"], next(reader)[0]["input"])


def test_check_names_a_missing_folder(tmp_path: Path) -> None:
    (problem,) = problems(str(tmp_path / "nowhere"))
    assert problem.key == "data.path" and "there is no folder" in problem.what


def test_check_names_a_file_given_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    (problem,) = problems(str(tmp_path / "text.jsonl"))
    assert problem.key == "data.path" and "is a file" in problem.what


def test_check_names_an_empty_folder(tmp_path: Path) -> None:
    (problem,) = problems(str(folder_of(tmp_path)))
    assert problem.key == "data.path" and "no .jsonl file" in problem.what


def test_check_names_files_without_records(tmp_path: Path) -> None:
    (problem,) = problems(str(folder_of(tmp_path, [], [])))
    assert problem.key == "data.path" and "hold no record" in problem.what


def test_check_names_a_missing_field_and_offers_one(tmp_path: Path) -> None:
    (problem,) = problems(str(folder_of(tmp_path, [{"id": 1, "content": "a"}])))
    assert problem.key == "data.field" and problem.tries == ("data.field=content",)


def test_check_names_a_field_that_is_no_text(tmp_path: Path) -> None:
    (problem,) = problems(str(folder_of(tmp_path, [{"text": 3}])))
    assert problem.key == "data.field" and "int" in problem.what


def test_check_names_a_line_that_is_no_json(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [])
    (folder / "0.jsonl").write_text("\nplain words\n")
    (problem,) = problems(str(folder))
    assert dict(problem.details)["at"].endswith("0.jsonl:2")


def test_check_reports_every_fault_at_once() -> None:
    found = problems(3, "", feild="text")
    assert [problem.key for problem in found] == ["data.feild", "data.field"]
    assert found[0].tries == ("field",)


def test_a_later_record_without_the_field_is_refused_with_its_place(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [{"text": "a"}, {"txt": "b"}])
    with pytest.raises(ConfigError, match=r"0\.jsonl:2"):
        list(sources.documents(str(folder), "text"))
