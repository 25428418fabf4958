"""Tables of the producer's commands."""

from tokenmill.producer.cli_output import (
    JOB_HEADER,
    JOB_SPARE,
    fit_columns,
    print_table,
)

ID = "smollm2-135m.0." + "a" * 31
ROW = (ID, "succeeded", "interactive", "default", "12", "3m05s", "1.2s")


def names(width: int) -> list[str]:
    columns = list(zip(JOB_HEADER, ROW, strict=True))
    return [column[0] for column in fit_columns(columns, width, JOB_SPARE)]


def test_a_narrow_terminal_goes_without_columns_but_keeps_ids_whole() -> None:
    assert names(200) == list(JOB_HEADER)
    assert names(80) == ["JOB", "STATE", "TOKENS", "AGE", "TOOK"]
    assert names(60) == ["JOB", "STATE"]
    assert names(10) == ["JOB"]


def test_a_cell_stays_on_its_line_and_moves_no_cursor(capsys) -> None:
    print_table(["A", "B"], [["x\ny", "\x1b[2J"]])
    assert capsys.readouterr().out == "A     B\nx\\ny  \\x1b[2J\n"
