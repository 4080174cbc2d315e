"""Random programs of arrays on simulated ranks, and how they are written."""

import pytest
from array_programs import FAMILIES, program, run_program
from same_bits import check_everything, check_programs

import hpcdist as dist
from hpcdist.mesh.rules import cumulative

MORE = pytest.mark.thorough


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [*((ranks, range(15)) for ranks in range(1, 5)), pytest.param(3, range(500, 600), marks=MORE)],
    ids=str,
)
def test_each_line_comes_to_what_numpy_says(ranks, seeds):
    for seed in seeds:
        dist.simulate(ranks, run_program, program(seed))


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=MORE)])
def test_any_number_of_ranks_gives_the_same_bits(ranks):
    dist.simulate(ranks, check_everything)


@MORE
def test_exact_lines_have_the_same_bits_on_any_number_of_ranks():
    dist.simulate(4, check_programs, range(900, 940))


def test_a_seed_always_gives_the_same_program():
    assert program(7) == program(7)
    assert program(7) != program(8)
    assert len(program(7, length=5).lines) == 5


@MORE
def test_programs_have_lines_of_all_kinds():
    text = "\n".join(str(program(seed)) for seed in range(500))
    for family in FAMILIES.values():
        for template in family.templates:
            name = template.partition("(")[0]
            assert not name.startswith("np.") or name in text, template


def test_a_line_that_comes_to_something_else_is_told_with_all_that_is_needed_to_run_it_again(
    monkeypatch,
):
    right = cumulative.running
    monkeypatch.setattr(cumulative, "running", lambda x, *args: right(x, *args) + 1)
    seed = next(seed for seed in range(100) if "cumsum" in str(program(seed)))
    with pytest.raises(AssertionError) as caught:
        dist.simulate(2, run_program, program(seed))
    told = str(caught.value)
    assert f"program({seed}, 20, 8) on" in told
    assert "np.cumsum" in told or ".cumsum" in told
    assert str(program(seed).lines[0].text) in told
