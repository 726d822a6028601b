"""Faults in the kernels are caught: the list of all, and a few; see emulator/README.md."""

import random

import needs
import pytest
from emulator.faults import LAYERS, LIST, RULES, all_faults, verdict

FAULTS = list(all_faults())


def test_the_list_is_that_of_the_sources():
    """Else: PYTHONPATH=.:tests python -m emulator.faults --write."""
    assert LIST.read_text(encoding="utf-8").splitlines() == [str(fault) for fault in FAULTS]


def test_every_rule_and_every_layer_has_faults():
    assert {fault.rule for fault in FAULTS} == set(RULES)
    assert {fault.path.split("/")[0] for fault in FAULTS} == set(LAYERS)


@pytest.mark.parametrize("rule", ["barrier", "wait", "rescale"])
def test_a_fault_is_caught(rule):
    needs.cxx()
    numbers = [i for i, fault in enumerate(FAULTS) if fault.rule == rule and "simt" in fault.path]
    numbers = numbers or [i for i, fault in enumerate(FAULTS) if fault.rule == rule]
    number = random.Random(4).choice(numbers)
    assert verdict(number).startswith("caught: "), FAULTS[number]
