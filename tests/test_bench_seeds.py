"""The articles' tables: their numbers, what they compare, and what a machine without a GPU says."""

import pytest

from dwtir import ARTICLE_STEPS, Shape, suite
from dwtir.bench import seeds
from dwtir.bench.__main__ import main
from dwtir.bench.articles import LIBRARY, PUBLISHED_US, TABLES, TUNED
from dwtir.kernel import Timing
from dwtir.target import resolve
from processes import command


def test_tables_hold_every_number_of_known_ways():
    shown = {case for table in TABLES for line, bases in table.lines.items() for case in (line, *bases)} - {None}
    assert shown == set(PUBLISHED_US)
    assert ARTICLE_STEPS.keys() == {table.article.name for table in TABLES}
    assert {case.way for case in shown} <= {LIBRARY, TUNED}.union(*ARTICLE_STEPS.values())
    assert all(len(bases) == len(table.against) for table in TABLES for bases in table.lines.values())


def test_the_numbers_are_those_of_the_suite():
    published = {(shape, us) for shape, times, _ in suite.seed_rows() for us in times.values()}
    assert {(Shape.parse(case.shape), us) for case, us in PUBLISHED_US.items()} == published


PRINTED = [
    ("Blocks of 32 x 32 outputs", 1, [1.6, 2.9]),
    ("Kernel size and channel multiplier", 0, [2.8, 4.6, 4.6, 7.1]),
    # The article has 2.3 for v1, which its own times contradict.
    ("From naive to tuned", 0, [1.0, 4.3, 43.2, 325.8, 411.3, 940.1, 47.3]),
    ("From naive to tuned", 1, [4.3, 10.1, 7.5, 1.3, 2.3]),
]


@pytest.mark.parametrize(("title", "column", "printed"), PRINTED)
def test_ratios_are_those_that_the_articles_print(title, column, printed):
    (table,) = (table for table in TABLES if table.title == title)
    pairs = [(bases[column], case) for case, bases in table.lines.items() if bases[column]]
    assert [round(PUBLISHED_US[base] / PUBLISHED_US[case], 1) for base, case in pairs] == printed


def test_a_table_sets_both_ratios_side_by_side():
    times = {case: Timing(us * 2e-6, us * 2e-6, us * 2e-6, 7) for case, us in PUBLISHED_US.items()}
    ladder = TABLES[-1]
    missing = {case: "no tuning record" for case in ladder.lines if case.way == TUNED}
    head, naive, first, *_, tuned, library = seeds.table_cells(ladder, times | missing)
    assert head == ("layer", "schedule", "T4", "here", "over naive", "here", "over the step before", "here")
    assert naive[4:] == ("1.00x", "1.00x", "", "")
    assert first[2:6] == ("768.7", "1537.40", "4.28x", "4.28x")
    assert tuned[2:] == ("3.5", "no tuning record", "940.11x", "-", "2.29x", "-")
    assert library[1] == "PyTorch, here PyTorch"


def test_the_command_shows_every_table(capsys):
    out, _ = command(main, capsys)("--target", "cpu", "--baselines", "none", "--warm", "--rounds", "1", "seeds")
    for table in TABLES:
        _, begin, rest = out.partition(f"\n{table.article.name}: {table.title}\n")
        assert begin
        lines = rest.split("\n\n")[0].splitlines()[1:]
        assert len(lines) == len(table.lines)
        assert all(seeds.NEEDS_GPU in line for line in lines)


@pytest.mark.gpu
def test_all_cases_are_measured_on_a_gpu():
    found = seeds.measure(resolve("cuda"), baselines=True, rounds=2)
    missing = {(case.way, why) for case, why in found.items() if isinstance(why, str)}
    assert missing <= {(TUNED, "no tuning record")}
