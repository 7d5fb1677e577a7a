"""Test that different ranks are reported on every rank before the first step."""

import socket

import pytest
import torch.distributed as dist

from swiftlite.base.errors import UserError
from swiftlite.runtime.agreement import check_agreement, differences, digest
from tests.messages import mention_each, mentions
from tests.parallel.launch import launch


def test_the_same_everywhere():
    assert differences([("a", {"x": "1", "y": "2"}), ("b", {"y": "2", "x": "1"})]) == []


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (["1", "2", "1"], "x: 1 2 3 node1"),
        (["2", "1", "1"], "x: 1 2 3 0 node0"),
        (["1", "2"], "x: 1 2 node1"),  # a tie: the lowest rank is taken for right
        (["1", "2", "3"], "x: 1 3 2 node1 node2"),
    ],
)
def test_the_minority_is_named(values, problem):
    assert mention_each(
        differences([(f"node{rank}", {"x": value, "same": "0"}) for rank, value in enumerate(values)]), [problem]
    )


def test_a_fact_that_a_rank_lacks_differs():
    assert mention_each(differences([("a", {"x": "1"}), ("b", {}), ("c", {"x": "1"})]), ["x: 1 2 3 b"])


def test_many_strangers_are_counted():
    everyone = [("a", {"x": "1"})] * 12 + [("b", {"x": "2"})] * 10
    (problem,) = differences(everyone)
    assert mentions(problem, "2 19 b")


def test_a_digest_does_not_depend_on_the_order_of_keys():
    assert digest({"a": 1, "b": [1, "x"]}) == digest({"b": [1, "x"], "a": 1})
    assert digest({"a": 1}) != digest({"a": 1.5})


def ask(arguments: list[str]) -> str | None:
    dist.init_process_group("gloo")
    try:
        check_agreement({"arguments": digest(arguments[dist.get_rank()]), "torch": "2.13"})
        return None
    except UserError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.gloo
def test_every_rank_is_told():
    assert launch(3, ask, ["a", "a", "a"]) == [None] * 3
    told = launch(3, ask, ["a", "a", "b"])
    assert told[0] is not None
    assert told == [told[0]] * 3
    assert mention_each(
        told[0].splitlines(), ["", f"arguments: {digest('a')} 2 3 {digest('b')} {socket.gethostname()}", ""]
    )
