"""Dicts of the call in another order than the example's: served where the model reads by key, else refused."""

import collections
import itertools

import pytest
import torch

from aotexport_runtime import CallInvalid
from tests.refusals import refusal

ORDERS = [order for order in itertools.permutations("abc") if order != ("a", "b", "c")]


def by_key(batch):
    return batch["a"] * 2 + batch["b"] * batch["c"]


def passed_on(batch):
    return by_key({"c": batch["c"], **{key: batch[key] for key in ("b", "a")}})


def named(a, b, c):
    return a - b * c


def sorted_values(batch):
    return torch.stack([value for _, value in sorted(batch.items())])


def keywords(**batch):
    return named(**batch)


def nested(batch):
    return by_key(batch["inner"][0]) + batch["flag"] * batch["scale"]


def folded(batch):
    total = torch.zeros(3)
    for value in batch.values():
        total = total * 2 + value
    return total


def doubled(batch):
    return {key: value * 2 for key, value in batch.items()}


def extended(batch):
    batch["sum"] = batch["a"] + batch["b"]
    return batch["c"]


def batch(order="abc", *, of=dict):
    torch.manual_seed(0)
    values = {key: torch.randn(3) for key in "abc"}
    return of((key, values[key]) for key in order)


@pytest.mark.parametrize("function", [passed_on, lambda batch: named(**batch), sorted_values])
def test_dict_that_is_read_by_key_is_taken_in_every_order(function, load):
    bundle = load(function, batch(), target="auto")
    for order in ORDERS:
        assert torch.equal(bundle(batch(order)), function(batch(order)))


@pytest.mark.parametrize("of", [collections.OrderedDict, collections.UserDict])
def test_dicts_of_other_classes_are_taken_in_every_order(of, load):
    bundle = load(by_key, batch(of=of), target="auto")
    for order in ORDERS:
        assert torch.equal(bundle(batch(order, of=of)), by_key(batch(order)))


def test_keywords_that_are_read_by_name_are_taken_in_every_order(load):
    bundle = load(keywords, kwargs=batch(), target="auto")
    for order in ORDERS:
        assert torch.equal(bundle(**batch(order)), keywords(**batch(order)))


def test_nested_dicts_are_taken_in_every_order(load):
    bundle = load(nested, {"inner": [batch()], "scale": torch.ones(3), "flag": 3}, target="auto")
    other = {"scale": torch.ones(3), "flag": 3, "inner": [batch("cab")]}
    assert torch.equal(bundle(other), nested(other))
    assert refusal(CallInvalid, bundle, {**other, "inner": [{**batch("cb"), "d": torch.ones(3)}]}) == (
        "the call does not fit program `infer`:\n"
        "  - `batch['inner'][0]`: expected a dict with keys ['a', 'b', 'c'] in any order; missing: 'a'; unexpected: 'd'"
    )


@pytest.mark.parametrize("function", [folded, doubled, extended])
def test_dict_whose_order_the_model_reads_is_taken_in_that_alone(function, load):
    bundle = load(function, batch(), target="auto")
    got, expected = bundle(batch()), function(batch())
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not isinstance(got, dict) or list(got) == list(expected)
    for order in ORDERS:
        with pytest.raises(CallInvalid, match=r"expected a dict with keys \['a', 'b', 'c'\] in this order, got a dict"):
            bundle(batch(order))


def test_changed_dict_keeps_its_order_beside_one_that_is_read_by_key(load):
    def model(batch, cache):
        cache["seen"] = by_key(batch) + cache["seen"]
        return cache["seen"].sum()

    bundle = load(model, batch(), {"seen": torch.zeros(3), "count": 1}, target="auto")
    cache, own = ({"seen": torch.ones(3), "count": 1} for _ in range(2))
    assert torch.equal(bundle(batch("cba"), cache), model(batch("cba"), own))
    assert torch.equal(cache["seen"], own["seen"])
    with pytest.raises(CallInvalid, match=r"`cache`: expected a dict with keys \['seen', 'count'\] in this order"):
        bundle(batch("cba"), {"count": 1, "seen": torch.ones(3)})


def test_keywords_whose_order_the_model_reads_are_taken_in_that_alone(load):
    bundle = load(lambda **batch: torch.stack(list(batch.values())), kwargs=batch(), target="auto")
    for order in ORDERS:
        with pytest.raises(CallInvalid, match="keyword arguments a, b, c: expected in this order, as at capture"):
            bundle(**batch(order))
