import pytest

from mint.cli.output import print_table


def test_a_table_prints_ids_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    ids = ["0b3e:train:0", ":smile:", "[bold]x[/bold]", "a:sample:1"]
    print_table(["id"], [[one] for one in ids])
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == ["id", *ids]
