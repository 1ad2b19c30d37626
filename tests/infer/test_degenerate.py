import pytest

from infer.degenerate import is_degenerate, repeated_share


@pytest.mark.parametrize("period", [1, 2, 7, 8, 9, 63, 64])
def test_a_tail_of_three_periods_over_24_tokens_is_degenerate(period: int) -> None:
    length = max(3 * period, 24)
    looped = [1000, 1001] + [i % period for i in range(length)]
    assert is_degenerate(looped)
    assert not is_degenerate(looped[:1] + looped[3:])


def test_a_period_above_64_is_no_loop() -> None:
    assert not is_degenerate([i % 65 for i in range(65 * 4)])


def test_a_loop_that_was_left_is_no_loop() -> None:
    assert is_degenerate([5] * 30)
    assert not is_degenerate([5] * 30 + [6])


def test_short_and_empty_texts_are_no_loops() -> None:
    assert not is_degenerate([])
    assert not is_degenerate([1])
    assert not is_degenerate([1] * 23)
    assert is_degenerate([1] * 24)


def test_repeated_share_counts_tokens_that_complete_a_seen_ngram() -> None:
    assert repeated_share([1, 2], [3, 1, 2, 3], n=2) == 0.5
    assert repeated_share([1, 2, 3], [1, 2, 3]) == pytest.approx(1 / 3)
    assert repeated_share([], [1, 2, 3, 4]) == 0.0
    assert repeated_share([1, 2, 3], []) == 0.0


def test_repetitions_inside_the_prompt_do_not_count() -> None:
    assert repeated_share([1, 1, 1, 1, 1, 1], [2, 3]) == 0.0


def test_a_loop_is_nearly_all_repeated() -> None:
    assert repeated_share([], [1, 2] * 50) == pytest.approx(0.96)
