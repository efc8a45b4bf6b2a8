"""What is said of a file as it was read."""

from metricopt_ext.data.reading import MOST, Column, Reading

AGE = Column("age", "number", 1, 40, 4, ["'-' in row 31", "'' in row 32", "'x' in row 40"])
JOB = Column("job", "category", 3, 3)
READING = Reading("utf-8", [AGE, JOB, Column("y", "class", 0, 2)])


def test_what_is_worth_a_look_is_said_in_words() -> None:
    assert READING.lines() == [
        "read as utf-8; columns: 1 number, 1 category, 1 class",
        "column 'age': number, 40 values, 4 without one ('-' in row 31, '' in row 32, 'x' in row 40, ...)",
    ]
    assert READING.inputs == ["age", "job", "job", "job"]
    assert Reading("LIBSVM data").lines() == ["read as LIBSVM data"]


def test_of_many_columns_those_worth_a_look_are_shown() -> None:
    assert [row[0] for row in READING.rows()] == ["'age'", "'job'", "'y'"]
    plain = [Column(f"c{i}", "number", 1, 9) for i in range(MOST)]
    rows = Reading("utf-8", [*plain, AGE]).rows()
    assert [row[0] for row in rows[-2:]] == ["'age'", "and 1 column like these"]
    assert rows[-2] == ["'age'", "number", "1", "40", "4: '-' in row 31, '' in row 32, 'x' in row 40, ..."]
    assert len(rows) == MOST + 1
    lines = Reading("utf-8", [AGE] * (MOST + 2)).lines()
    assert lines[-1] == "2 more columns are worth a look; report.json has them"


def test_names_from_files_stay_on_their_line() -> None:
    assert str(Column("a\n\x1b[2J", "number", 1, 9)) == "column 'a\\n\\x1b[2J': number, 9 values"
