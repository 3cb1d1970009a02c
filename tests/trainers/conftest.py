"""Bundles that trainers train, exported once."""

from pathlib import Path

import pytest

from tests.trainers.digits import export_classifier, export_reader, export_writer


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a classifier of images."""
    return export_classifier(tmp_path_factory.mktemp("trainers") / "classifier")


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a classifier of text that computes its loss."""
    return export_reader(tmp_path_factory.mktemp("trainers") / "reader")


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a language model of a recipe, with one weight that reads and scores tokens."""
    return export_writer(tmp_path_factory.mktemp("trainers") / "writer")
