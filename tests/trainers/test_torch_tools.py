"""What torch and torchmetrics do with a module in training, with a loaded bundle beside the model."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

from aotexport_runtime import load
from tests.trainers.digits import Classifier, pixels


def train_and_average(model: nn.Module, **options) -> tuple[AveragedModel, list[float]]:
    """Train two epochs, averaging weights from the first on; return the average and the losses."""
    torch.manual_seed(1)
    averaged = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    losses = []
    for _ in range(2):
        for images, labels in DataLoader(pixels(0, 256), batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
            losses.append(loss.item())
        schedule.step()
    return averaged, losses


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}])
def test_averaged_bundle_is_the_averaged_model(classifier, options):
    expected, wanted = train_and_average(Classifier(), **options)
    averaged, losses = train_and_average(load(classifier), **options)
    assert losses == pytest.approx(wanted, rel=1e-4)
    torch.testing.assert_close(averaged.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)
    images = pixels(256, 320).tensors[0]
    torch.testing.assert_close(averaged.eval()(images), expected.eval()(images), rtol=1e-4, atol=1e-5)


def test_batch_norms_of_a_bundle_are_updated_as_those_of_the_model(classifier):
    model, module = Classifier(), load(classifier)
    for each in (model, module):
        torch.manual_seed(1)
        update_bn(DataLoader(pixels(0, 256), batch_size=64), each)
    assert model[1].running_mean.abs().max() > 0.1
    torch.testing.assert_close(module.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-6)
