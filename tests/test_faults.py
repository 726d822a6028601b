"""Faults in the kernels are caught: the list of all, and a few; see emulator/README.md."""

import random

import needs
import pytest
from emulator.faults import (
    COUNT,
    LAYERS,
    LIST,
    RULES,
    all_faults,
    is_fault,
    known,
    named,
    verdict,
)

FAULTS = list(all_faults())


def test_the_list_is_that_of_the_sources():
    """Else: PYTHONPATH=.:tests python -m emulator.faults --write."""
    assert LIST.read_text(encoding="utf-8").splitlines() == [str(fault) for fault in FAULTS]


def test_every_rule_and_every_layer_has_faults():
    assert {fault.rule for fault in FAULTS} == set(RULES)
    assert {fault.path.split("/")[0] for fault in FAULTS} == set(LAYERS)


def test_what_was_drawn_is_caught_or_makes_no_difference():
    """Else: PYTHONPATH=.:tests python -m emulator.faults --draw, and why what survived may."""
    verdicts = known()
    assert list(verdicts) == list(named(FAULTS))[: len(verdicts)]
    says = list(filter(is_fault, verdicts.values()))
    assert len(says) == COUNT
    for each in says:
        assert each.startswith(("caught: ", "equivalent: ")), each


@pytest.mark.parametrize("rule", ["barrier", "wait", "rescale"])
def test_a_fault_is_caught(rule):
    needs.cxx()
    numbers = [i for i, fault in enumerate(FAULTS) if fault.rule == rule and "simt" in fault.path]
    numbers = numbers or [i for i, fault in enumerate(FAULTS) if fault.rule == rule]
    number = random.Random(4).choice(numbers)
    assert verdict(number).startswith("caught: "), FAULTS[number]
