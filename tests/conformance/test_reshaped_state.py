"""Tensors of the module whose shape, dtype or memory a call changes: later calls do as in eager, or it is refused."""

import pytest
import torch
from torch import nn

import aotexport
import aotexport_runtime
from aotexport_runtime import AotExportError
from tests.cases.subclasses import TwoTensor, two
from tests.refusals import refusal


class Model(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))
        self.memory = torch.zeros(0, 3)

    def forward(self, x):
        return self.step(self, x)


def counts_what_it_keeps(self, x):
    self.table = torch.cat([self.table, x])
    return x / self.table.shape[0]


def fills_its_memory_once(self, x):
    if self.memory.numel() == 0:
        self.memory = x * 2
    return x + self.memory


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (counts_what_it_keeps, r"`table` of the model from float32\[2, 3\] into float32\[6, 3\]"),
        (fills_its_memory_once, r"`memory` of the model from float32\[0, 3\] into float32\[4, 3\]"),
    ],
)
def test_call_that_reads_what_an_earlier_one_reshaped_is_refused(tmp_path, step, named):
    with pytest.raises(AotExportError, match=rf"a call turns {named}, and the next call may do something else"):
        aotexport.export(Model(step), (torch.randn(4, 3),), output=tmp_path / "bundle", verify=False)


def test_model_that_was_called_before_the_export_is_taken(load):
    model, x = Model(fills_its_memory_once), torch.randn(4, 3)
    model(x)
    assert torch.equal(load(model, x, programs=["infer"], target="auto")(x * 3), model(x * 3))


def builds_a_table_of_its_width(self, x):
    if self.memory.shape[1] < x.shape[1] + 2:
        self.memory = torch.arange(x.shape[1] + 2.0)[None].repeat(2, 1)
    return x + self.memory[0, : x.shape[1]]


def converts_its_table(self, x):
    self.table = self.table.double().t().contiguous().t()
    return x * self.table.sum()


@pytest.mark.parametrize("step", [builds_a_table_of_its_width, converts_its_table])
def test_first_call_that_only_prepares_is_taken(load, step):
    model = Model(step)
    loaded = load(model, torch.randn(4, 3), programs=["infer"], target="auto")
    for x in torch.randn(3, 4, 3):
        assert torch.equal(loaded(x), model(x))
    assert loaded.table.dtype == model.table.dtype
    assert loaded.table.stride() == model.table.stride()


def resized(self, x):
    self.table.resize_as_(x).copy_(x)
    return x + 1


def written_by_an_operator(self, x):
    torch.add(x, x, out=self.table)
    return x + 1


@pytest.mark.parametrize(
    ("step", "operator"), [(resized, "aten.resize_as_.default"), (written_by_an_operator, "aten.add.out")]
)
def test_buffer_that_needs_more_memory_is_refused_by_operator_and_line(tmp_path, step, operator):
    with pytest.raises(AotExportError) as raised:
        aotexport.export(Model(step), (torch.randn(4, 3),), output=tmp_path / "bundle", verify=False)
    line = step.__code__.co_firstlineno + 1
    assert f"test_reshaped_state.py:{line}: in {step.__name__}: `{operator}` changes how much memory `table`" in str(
        raised.value
    )


def test_memory_freed_by_a_call_is_refused(tmp_path):
    def freed(self, x):
        self.table.untyped_storage().resize_(0)
        return x + 1

    with pytest.raises(AotExportError, match="a call changes how much memory `table` of the model has"):
        aotexport.export(Model(freed), (torch.randn(4, 3),), output=tmp_path / "bundle", verify=False)


class GrowsInTraining(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read
        self.register_buffer("bank", torch.ones(2, 3))

    def forward(self, x):
        if self.training:
            self.bank = torch.cat([self.bank, x.detach()])
            return x + 1
        return self.read(x, self.bank)


def test_program_is_judged_by_what_another_leaves(tmp_path, load):
    programs = ["infer", "train"]
    model = GrowsInTraining(lambda x, bank: x * bank.shape[0])
    with pytest.raises(AotExportError, match="a call turns `bank`"):
        aotexport.export(model, (torch.randn(4, 3),), output=tmp_path / "refused", programs=programs)
    model, x = GrowsInTraining(lambda x, bank: x * bank.sum(0)), torch.randn(4, 3)
    loaded = load(model, x, programs=programs, target="auto")
    for training in (True, False, True, True, False):
        assert torch.equal(loaded.train(training)(x), model.train(training)(x))


def test_state_of_the_size_of_the_last_batch_is_kept(new_bundle):
    def keeps(self, x):
        answer = x + self.memory.sum(0)
        self.memory = x.detach() * 1
        return answer

    model, sizes = Model(keeps), ({0: torch.export.Dim("batch")},)
    bundle = new_bundle(model, torch.randn(4, 3), dynamic_shapes=sizes, programs=["infer"])
    portable, autograd = (aotexport_runtime.load(bundle, target=each) for each in ("portable", "autograd"))
    for rows in (3, 5, 1, 2, 0, 7):
        x = torch.randn(rows, 3)
        expected = model(x)
        assert torch.equal(portable(x), expected)
        assert torch.equal(autograd(x), expected)


def begins_anew_for_another_batch(self, x):
    memory = torch.zeros_like(self.memory)
    if memory.shape != x.shape:
        memory = torch.zeros_like(x)
    self.memory = memory * 0.5 + x
    return self.memory * 2


def goes_on_unless_the_batch_is_another(self, x):
    memory = self.memory if self.memory.shape == x.shape else torch.zeros_like(x)
    self.memory = memory * 0.5 + x.detach()
    return self.memory * 2


def test_state_that_begins_anew_in_every_call_is_taken_in_all_sizes(load):
    model, sizes = Model(begins_anew_for_another_batch), ({0: torch.export.Dim("batch", min=1, max=64)},)
    loaded = load(model, torch.randn(4, 3), dynamic_shapes=sizes, programs=["infer"], target="auto")
    for rows in (4, 1, 7, 7, 2):
        x = torch.randn(rows, 3)
        assert torch.equal(loaded(x), model(x))


def test_state_that_goes_on_in_some_sizes_is_refused(tmp_path):
    model, sizes = Model(goes_on_unless_the_batch_is_another), ({0: torch.export.Dim("batch", min=1, max=64)},)
    with pytest.raises(AotExportError, match="a call turns `memory`"):
        aotexport.export(model, (torch.randn(4, 3),), output=tmp_path / "bundle", dynamic_shapes=sizes)


class Outer(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.inner = Model(step)

    def forward(self, x):
        return self.inner(x) * 2


def test_table_of_a_submodule_grows_from_call_to_call(load):
    def grows(self, x):
        self.table = torch.cat([self.table, x.detach()])
        return x + self.table.sum(0)

    model, x = Outer(grows), torch.randn(4, 3)
    loaded = load(model, x, target="auto")
    for training in (True, True, False, True):
        assert torch.equal(loaded.train(training)(x), model.train(training)(x))
        # Programs are composed anew, and find what calls left.
        loaded.changed()
    assert loaded.inner.table.shape == model.inner.table.shape
    # The user begins anew, with as many rows as at the load.
    loaded.inner.table, model.inner.table = torch.ones(2, 3), torch.ones(2, 3)
    for _ in range(2):
        assert torch.equal(loaded(x), model(x))


def test_tensor_of_the_whole_module_is_not_replaced_by_one_of_another_shape(new_bundle):
    model, x = Model(lambda self, x: x / self.table.shape[0] + self.table.mean() + self.pair.a), torch.randn(4, 3)
    model.pair = nn.Parameter(two(3))
    loaded = aotexport_runtime.load(new_bundle(model, x, programs=["infer"]), tensor_types=[TwoTensor]).eval()
    before, loaded.table = loaded.table, torch.ones(5, 3)
    assert refusal(AotExportError, loaded, x) == (
        "`table` is float32[5, 3] now, and program `infer` was captured with float32[2, 3]. Put one of that dtype and "
        "shape in its place, replace the whole submodule that reads it, or change the model and export it again"
    )
    loaded.table = before
    assert torch.equal(loaded(x), model(x))
