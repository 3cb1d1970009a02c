"""Lists, dicts and dataclasses of the caller that a call changes."""

import pytest
import torch

import aotexport
import aotexport_runtime
from aotexport_runtime import CallInvalid
from tests.cases.structure import Derived, Scale


def cached(x, cache):
    """Attend to what was seen before, and remember this."""
    seen = torch.cat([cache["seen"], x]) if "seen" in cache else x
    cache["seen"], cache["count"] = seen, len(cache)
    cache.setdefault("own", []).append(x)
    return seen.sum(0)


@pytest.fixture(params=["portable", "autograd"])
def loaded(request, load):
    rows, more = torch.export.Dim("rows", min=1), torch.export.Dim("more", min=1)
    later = {"seen": torch.randn(3, 2), "count": 0, "own": [torch.randn(2, 2)]}
    shapes = ({0: rows}, {"seen": {0: more}, "count": None, "own": None})
    variants = [aotexport.Example((torch.randn(2, 2), later), dynamic_shapes=shapes)]
    return load(cached, torch.randn(2, 2), {}, variants=variants, target=request.param)


def test_container_of_the_caller_is_changed_from_call_to_call(loaded):
    results = []
    for function in (cached, loaded):
        torch.manual_seed(0)
        cache = {}
        own = []
        for _ in range(2):
            x = torch.randn(2, 2)
            own.append(x)
            results.append((function(x, cache), cache["seen"], list(cache["own"])))
            assert list(cache) == ["seen", "count", "own"]
            if len(own) == 1:
                cache["count"] = 0
        assert all(kept is x for kept, x in zip(cache["own"], own, strict=True))
    torch.testing.assert_close(results[2:], results[:2])


def test_call_that_fits_no_variant_changes_nothing(loaded):
    cache = {"seen": torch.randn(3, 2), "count": 5, "own": []}
    with pytest.raises(CallInvalid, match=r"`cache\['count'\]`: expected 0, as at capture, got 5"):
        loaded(torch.randn(2, 2), cache)
    assert list(cache) == ["seen", "count", "own"]


def put(x, first, second):
    first.append(x * 2)
    return x + len(second)


def test_one_container_in_two_places_is_refused(tmp_path):
    x, both = torch.ones(2), []
    message = "the call changes `first` of its arguments, and `first` and `second` are one object. Pass copies"
    with pytest.raises(aotexport.ExportFailed, match=message):
        aotexport.export(put, (x, both, both), output=tmp_path / "refused")
    loaded = aotexport_runtime.load(aotexport.export(put, (x, [], []), output=tmp_path / "bundle").path)
    with pytest.raises(CallInvalid, match="`second`: expected another object than `first`, as at capture, since the"):
        loaded(x, both, both)
    assert both == []


def remembers(x, table={}):  # noqa: B006 (what the test is about)
    table["x"] = x
    return x * 2


def deletes(x, record):
    del record.doubled
    return x * 2


def ties(x, table):
    table["itself"] = table
    return x * 2


@pytest.mark.parametrize(
    ("function", "args", "reason"),
    [
        (
            remembers,
            (),
            "the call changes `table` of its arguments, and it is a default, which later calls find changed",
        ),
        (
            deletes,
            (Derived(torch.ones(2)),),
            "the call changes `record` of its arguments, and deletes the attribute `doubled`, which a bundle cannot do",
        ),
        (
            ties,
            ({},),
            "the call puts one of the lists or dicts that it is given into `table['itself']` of its arguments",
        ),
    ],
    ids=["default", "attribute", "cycle"],
)
def test_change_that_a_bundle_cannot_make_is_refused_by_name(tmp_path, function, args, reason):
    with pytest.raises(aotexport.ExportFailed) as caught:
        aotexport.export(function, (torch.ones(2), *args), output=tmp_path / "bundle", verify=False)
    assert str(caught.value).startswith(reason)
    assert remembers.__defaults__ == ({},)


def test_argument_that_holds_itself_is_refused(tmp_path):
    scale = Scale(2, 1)
    scale.by = scale
    with pytest.raises(aotexport.ExportFailed) as caught:
        aotexport.export(lambda x, scale: x, (torch.ones(2), scale), output=tmp_path / "bundle")
    assert str(caught.value) == "input `scale.by` holds itself; a bundle holds trees of values"
