"""Programs replayed from graphs, as a training loop and a careless user call them, against eager.

The lowered form is the program's portable one, and a stand-in captures: a replay runs it again and fills the very
tensors that the first run returned, as a CUDA graph does.
"""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import aotexport
from aotexport_runtime.engines.cuda.engine import with_graphs
from aotexport_runtime.engines.cuda.graphs import MAX_GRAPHS, WARM_UPS, GraphedProgram
from aotexport_runtime.engines.cuda.trial import portable_form
from aotexport_runtime.engines.lowered import Lowered
from aotexport_runtime.engines.select import Choice
from aotexport_runtime.module import loading


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.second(hidden), hidden


class RunningAgain:
    """Stands in for CUDA graphs."""

    def __init__(self):
        self.captures = self.replays = 0
        self.is_possible, self.fails = True, False

    def possible(self):
        return self.is_possible

    def ordered(self):
        return contextlib.nullcontext()

    def capture(self, run):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        outputs = run()

        def replay():
            self.replays += 1
            for kept, value in zip(outputs, run(), strict=True):
                if isinstance(kept, torch.Tensor):
                    kept.data.copy_(value)  # A replay raises no version.

        return replay, outputs


class Engine:
    def __init__(self, capture):
        self.capture = capture

    def __call__(self, bundle, program, environment):
        lowered = dataclasses.replace(portable_form(bundle, program, environment), target="cuda")
        return with_graphs(lowered, program, self.capture)


class WithLoss(Net):
    """The network, which returns a loss."""

    def forward(self, x):
        output, hidden = super().forward(x)
        return output.square().sum() + hidden.sum()


def test_a_whole_step_is_one_graph_and_equals_torch(tmp_path, monkeypatch):
    torch.manual_seed(0)
    eager = WithLoss()
    step = aotexport.Step("adamw", {"lr": 0.1}, clip=True)
    aotexport.export(eager, (torch.randn(4, 3),), output=tmp_path / "b", step=step, programs=("train",), verify=False)
    capture = RunningAgain()
    monkeypatch.setattr(loading, "select_targets", lambda *args, **options: Choice(engines=("cuda",)))
    monkeypatch.setattr("aotexport_runtime.engines.cuda.engine.CudaEngine", lambda options: Engine(capture))
    stepper, optimizer = (
        loading.load(tmp_path / "b").train().stepper(max_norm=0.5),
        torch.optim.AdamW(eager.parameters(), lr=0.1),
    )
    for step in range(10):
        x = torch.randn(4, 3)
        for group in (*stepper.param_groups, *optimizer.param_groups):
            group["lr"] = 0.1 / (1 + step)
        optimizer.zero_grad()
        loss = eager(x)
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        optimizer.step()
        torch.testing.assert_close(stepper(x), loss.detach())
    assert (capture.captures, capture.replays) == (1, 10 - WARM_UPS)


@pytest.fixture(scope="module")
def bundle(new_bundle):
    torch.manual_seed(0)
    model = Net()
    batch = torch.export.Dim("batch", min=2, max=64)
    return new_bundle(model, torch.randn(4, 3), dynamic_shapes={"x": {0: batch}}), model


@pytest.fixture
def pair(bundle, monkeypatch):
    """Return the bundle's module, eager's, and the stand-in."""
    path, model = bundle
    capture = RunningAgain()
    monkeypatch.setattr(loading, "select_targets", lambda *args, **options: Choice(engines=("cuda",)))
    monkeypatch.setattr("aotexport_runtime.engines.cuda.engine.CudaEngine", lambda options: Engine(capture))
    eager = Net()
    eager.load_state_dict(model.state_dict())
    return loading.load(path), eager, capture


def assert_same(module, eager):
    for (name, ours), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    for (name, ours), theirs in zip(module.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def train(module, steps, *, retain=False, set_to_none=True):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        output, hidden = module(torch.randn(4, 3, generator=generator))
        loss = output.square().sum() + hidden.sum()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"retain": True}, {"set_to_none": False}], ids=["plain", "retained", "kept"])
def test_training_replays_graphs_and_equals_eager(pair, options):
    module, eager, capture = pair
    for model in (module, eager):
        train(model, 12, **options)
    assert_same(module, eager)
    assert capture.captures == 2
    # Each capture is replayed by its own call; forward is captured first, and its backward warms up after that.
    forwards, backwards = 12 - WARM_UPS, (12 - WARM_UPS) * (2 if options.get("retain") else 1) - WARM_UPS
    assert capture.replays == forwards + backwards


def warmed_up(module, calls=2 * WARM_UPS + 2):
    """Call `module` until everything is captured, and leave no gradients."""
    for _ in range(calls):
        sum(output.sum() for output in module(torch.ones(4, 3))).backward()
    module.zero_grad()
    return module


def test_outputs_and_gradients_are_the_callers(pair):
    module, eager, _ = pair
    for model in (module, eager):
        warmed_up(model)
    kept = []
    for step in range(3):
        x = torch.full((4, 3), float(step)) + torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        results = [model(x) for model in (module, eager)]
        for output, _ in results:
            output.sum().backward()
        kept.append(results)
    for ours, theirs in kept:
        torch.testing.assert_close(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1])
    assert_same(module, eager)


def test_second_forward_before_the_first_backward_runs_without_the_graph(pair):
    module, eager, capture = pair
    for model in (module, eager):
        warmed_up(model)
    replays = capture.replays
    inputs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for model in (module, eager):
        losses = [model(x)[0].square().sum() for x in inputs]
        for loss in losses:
            loss.backward()
    assert_same(module, eager)
    assert capture.replays == replays + 2


def test_retained_backward_after_another_forward_is_right(pair):
    module, eager, _ = pair
    for model in (module, eager):
        warmed_up(model)
        first = model(torch.full((4, 3), 2.0) * torch.arange(4.0)[:, None])[0].square().sum()
        first.backward(retain_graph=True)
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))[0].square().sum().backward()
        first.backward()
    assert_same(module, eager)


def test_parameter_changed_before_backward_is_refused_as_in_eager(pair):
    module, eager, _ = pair
    for model in (module, eager):
        warmed_up(model)
        loss = model(torch.ones(4, 3))[0].square().sum()
        with torch.no_grad():
            model.second.weight.mul_(2) if model is eager else module.get_parameter("second.weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_replaced_parameters_are_read(pair):
    module, eager, capture = pair
    for model in (module, eager):
        warmed_up(model)
    captures = capture.captures
    for model in (module, eager):
        state = {name: value * 2 for name, value in model.state_dict().items() if value.is_floating_point()}
        model.load_state_dict(state, assign=True, strict=False)
        train(model, 8)
    assert_same(module, eager)
    assert capture.captures == captures + 2


def test_shapes_have_graphs_of_their_own_up_to_a_limit(pair):
    module, eager, capture = pair
    module.eval()
    eager.eval()
    with torch.no_grad():
        for _ in range(WARM_UPS + 2):
            for batch in range(2, MAX_GRAPHS + 4):
                x = torch.randn(batch, 3)
                torch.testing.assert_close(module(x), eager(x))
    assert capture.captures == MAX_GRAPHS


def test_strided_and_repeated_inputs_are_replayed():
    doubled = Lowered(target="cuda", forward=lambda args, symbols: (args[0] * 2,), backward=None, saved=0)
    capture = RunningAgain()
    program = GraphedProgram(doubled, 1, set(), capture)
    for step in range(WARM_UPS + 3):
        repeated = torch.full((1, 3), float(step))
        for x in (torch.randn(3, 4).t(), repeated.expand(4, 3), repeated.expand(2, 3)):
            (result,) = program.forward([x], {})
            torch.testing.assert_close(result, x * 2)
    assert capture.captures == 3


def test_program_that_cannot_be_captured_runs_without_graphs(pair, caplog):
    module, eager, capture = pair
    capture.fails = True
    for model in (module, eager):
        train(model, 6)
    assert_same(module, eager)
    assert "no CUDA graph, calls run without: operation not permitted when stream is capturing" in caplog.text


def test_graphs_captured_under_inference_mode_serve_other_calls(pair):
    module, eager, capture = pair
    module.eval()
    eager.eval()
    with torch.inference_mode():
        for _ in range(WARM_UPS + 2):
            module(torch.ones(4, 3))
    with torch.no_grad():
        torch.testing.assert_close(module(torch.zeros(4, 3)), eager(torch.zeros(4, 3)))
    assert capture.captures == 1


def test_settings_of_precision_have_graphs_of_their_own(pair):
    module, _, capture = pair
    module.eval()
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        with torch.no_grad():
            for precision in ("ieee", "tf32"):
                # Set apart from that of recurrent layers, which the older names of the switches cannot say.
                torch.backends.cudnn.conv.fp32_precision = precision
                for _ in range(WARM_UPS + 1):
                    module(torch.ones(4, 3))
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert capture.captures == 2
