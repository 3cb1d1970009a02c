"""Releases of torch that the exporter takes, and those that it tries on request."""

import pytest
import torch

import aotexport
from aotexport.torch_internals.releases import RELEASES, release

INSTALLED = release()


@pytest.fixture
def newer(monkeypatch):
    """Let the installed torch pass for one that nobody knows."""
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")


def test_unknown_torch_is_refused_with_the_releases_and_the_option(newer, tmp_path):
    with pytest.raises(aotexport.ExportFailed) as caught:
        aotexport.export(torch.sin, (torch.ones(2),), output=tmp_path / "bundle")
    assert str(caught.value) == (
        "torch 2.99.0+cpu is installed, and aotexport is tested with 2.13 to 2.15: install one of these, or try this "
        "one with --allow-untested-torch (allow_untested_torch=True)"
    )
    assert not (tmp_path / "bundle").exists()


def test_unknown_torch_is_taken_for_the_newest_release(newer):
    assert release() is RELEASES["2.15"]


def test_unknown_torch_exports_on_request(newer, monkeypatch, tmp_path):
    # The newest release is what the installed one is.
    monkeypatch.setitem(RELEASES, "2.15", INSTALLED)
    report = aotexport.export(torch.sin, (torch.ones(2),), output=tmp_path / "bundle", allow_untested_torch=True)
    assert report.path == tmp_path / "bundle"
