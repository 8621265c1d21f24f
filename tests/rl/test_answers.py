import pytest

from mint.rl.answers import canonical_number, digit_match, distance_credit, exact_match, extract_answer, fraction_passed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 8", "8"),
        ("8\nQ: What is 2 + 2?\nA: 4", "8"),
        ("A: 42", "42"),
        ("= 42.", "42"),
        ("42 apples are left.", "42"),
        ("42. There are 3 reasons for it.", "42"),
        ("3 + 5 = 8", "8"),
        ("12.5 + 1 = 13.5", "13.5"),
        ("7-5", "5"),
        ("7 - 5", "5"),
        ("-17", "-17"),
        ("−17", "-17"),
        ("+17", "17"),
        ("It is -17 degrees", "-17"),
        ("1,234", "1234"),
        ("1,234,567.50", "1234567.5"),
        ("$1,234.00", "1234"),
        ("costs $5", "5"),
        ("1, 2, 3", "1"),
        ("First 5, then 6, so the answer is 7, not 9", "7"),
        ("The answer is: **12**", "12"),
        ("Answer: 1,000 dollars", "1000"),
        ("16 - 3 - 4 = 9 eggs, 9 * 2 = 18\n#### 18", "18"),
        ("#### -3,000", "-3000"),
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{\frac{1}{2}} is the answer, 0.5", r"\frac{1}{2}"),
        (r"\boxed{12 \text{ cm}}", "12"),
        (r"\boxed{-7.0}", "-7"),
        (r"\boxed{x + 1}", "x + 1"),
        (r"cut off: 12 \boxed{34", "34"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("007", "7"),
        ("-0", "0"),
        ("50%", "50"),
        ("no idea", None),
        ("", None),
    ],
)
def test_the_answer_is_read_out_of_the_text(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize("number", [0, 8, -17, 1234, 1234567, -1000, 3.5, -0.25])
def test_an_answer_in_any_spelling_matches_the_number(number: float) -> None:
    for text in (
        f"{number}",
        f"{number:,}",
        rf"\boxed{{{number}}}",
        f"the answer is {number:,}.",
        f" {number}\nmore 9",
    ):
        assert exact_match(text, number) == 1.0
    assert exact_match(f"{number + 1}", number) == 0.0


def test_other_text_is_only_unwrapped() -> None:
    assert canonical_number(r" $\frac{1}{2}$ ") == r"\frac{1}{2}"


def test_the_share_of_tests_passed() -> None:
    assert fraction_passed([True, False, True, True]) == 0.75
    assert fraction_passed([]) == 0.0


def test_digits_are_matched_from_the_ones_place() -> None:
    assert digit_match("123", 123) == 1.0
    assert digit_match("113", 123) == pytest.approx(2 / 3)
    assert digit_match("23", 123) == pytest.approx(2 / 3)
    assert digit_match("1123", 123) == pytest.approx(3 / 4)
    assert digit_match("-123", 123) == 0.0
    assert digit_match("none", 123) == 0.0


def test_distance_earns_less_the_further_it_is() -> None:
    assert distance_credit("10", 10, scale=5) == 1.0
    assert distance_credit("15", 10, scale=5) == 0.5
    assert distance_credit("no", 10, scale=5) == 0.0
    assert distance_credit(r"\boxed{x}", 10, scale=5) == 0.0


def test_partial_credit_gives_groups_a_signal_that_right_or_wrong_does_not() -> None:
    answers = ["113", "23", "99", "124"]  # all wrong
    assert len({exact_match(answer, 123) for answer in answers}) == 1
    assert len({digit_match(answer, 123) for answer in answers}) > 1
