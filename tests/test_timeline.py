import pytest

from helpers.timeline import Span, mean, split


def spans(*parts):
    return [Span(*part) for part in parts]


def test_two_ranks_by_hand():
    # rank 0 is ready to sum at 4, rank 1 at 5; both have the sums at 7
    quick = spans(
        ("input", 0, 1),
        ("forward", 1, 2),
        ("backward", 2, 7),
        ("all_reduce", 3, 4),
        ("all_reduce", 4, 7),
        ("Optimizer.step", 7, 8),
    )
    slow = spans(
        ("input", 0, 0.5),
        ("forward", 1, 3),
        ("backward", 3, 7),
        ("all_reduce", 4, 5),
        ("all_reduce", 5, 7),
        ("Optimizer.step", 7, 9),
    )
    ((first,), (second,)) = split([quick, slow])
    assert (first.input, first.compute, first.waiting, first.exposed) == (1, 4, 1, 2)
    assert (second.input, second.compute, second.waiting, second.exposed) == (0.5, 6.5, 0, 2)
    assert (first.seconds, second.seconds) == (8, 9)


def test_one_rank_exposes_nothing():
    alone = spans(("input", 0, 1), ("forward", 1, 2), ("backward", 2, 4), ("Optimizer.step", 4, 5))
    ((step,),) = split([alone])
    assert (step.input, step.compute, step.waiting, step.exposed) == (1, 4, 0, 0)


def test_a_step_of_two_batches_sums_in_its_second():
    batches = spans(
        ("input", 0, 1),
        ("forward", 1, 2),
        ("backward", 2, 3),
        ("input", 3, 4),
        ("forward", 4, 5),
        ("backward", 5, 8),
        ("all_reduce", 6, 8),
        ("Optimizer.step", 8, 9),
    )
    again = [Span(span.name, span.start + 9, span.end + 9) for span in batches]
    (steps,) = split([batches + again])
    assert len(steps) == 2
    assert mean(steps) == steps[0]
    assert (steps[0].input, steps[0].compute, steps[0].exposed) == (2, 5, 2)


def test_an_average_of_weights_is_exposed():
    local = spans(
        ("input", 0, 1), ("backward", 1, 2), ("Optimizer.step", 2, 6), ("all_reduce", 3, 5)
    )
    ((step,),) = split([local])
    assert (step.compute, step.exposed) == (3, 2)


def test_ranks_with_other_numbers_of_steps_are_refused():
    one = spans(("input", 0, 1), ("Optimizer.step", 1, 2))
    two = one + spans(("input", 2, 3), ("Optimizer.step", 3, 4))
    with pytest.raises(ValueError, match="shorter"):
        split([two, one])
