"""Set the training or evaluation mode of a module, and attributes of its submodules, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from aotexport.errors import ExportFailed
from aotexport.model.call import Attribute
from aotexport.model.programs import Mode
from aotexport.model.state import State
from aotexport.state.tensors import UNCHANGED, restored
from aotexport.state.world import World, attributes_restored
from aotexport_runtime.errors import listed


@contextlib.contextmanager
def in_mode(module: nn.Module | None, mode: Mode, attributes: Sequence[Attribute] = ()) -> Iterator[None]:
    """Put `module` in `mode`, and every submodule back in its own mode afterwards.

    A module that is in this mode already is left alone: submodules that the user froze stay frozen. Attributes that the
    user's own `train` sets are put back, too.

    Args:
        module: the module; None: a function.
        mode: the mode.
        attributes: attributes to set, and to put back.
    """
    if module is None:
        yield
        return
    before = [(child, "training", child.training) for child in module.modules()]
    before += [(child, name, getattr(child, name)) for child, name, _ in attributes]
    switches = module.training != (mode == "train")
    own = World.of(module if switches and any(map(has_own_switches, module.modules())) else None)
    undo = own.put_back
    try:
        if switches:
            _switch(module, mode)
            undo = own.undoing()
        _set(attributes)
        yield
    finally:
        _set(before)
        undo()


def _switch(module: nn.Module, mode: Mode) -> None:
    # Modules made by `torch.export` have one mode only, and raise.
    with contextlib.suppress(NotImplementedError):
        module.train() if mode == "train" else module.eval()


def _set(attributes: Sequence[Attribute]) -> None:
    for child, name, value in attributes:
        setattr(child, name, value)


def has_own_switches(module: nn.Module) -> bool:
    """Return whether a module, its submodules aside, has a `train` or `eval` of its own."""
    own = vars(module)
    return any(name in own or getattr(type(module), name) is not getattr(nn.Module, name) for name in ("train", "eval"))


def refuse_own_switches(module: nn.Module | None, mode: Mode, state: State) -> None:
    """Refuse a module whose own `train` or `eval` does what that of a loaded bundle does not.

    It changes tensors, such as by merging weights; it freezes or thaws parameters; or it leaves submodules in the other
    mode that are in `mode` now.

    Raises:
        ExportFailed: names the tensor, parameter or submodule.
    """
    if module is None or not any(map(has_own_switches, module.modules())):
        return
    wanted = mode == "train"
    inside = [name for name, child in module.named_modules() if module.training == child.training == wanted]
    trains = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    with restored(state) as snapshot, attributes_restored(module):
        _switch(module, mode)
        entries = [entry for entry in state.entries for _ in entry.slots]
        for entry, change in zip(entries, snapshot.changes(), strict=True):
            if change is not UNCHANGED:
                raise ExportFailed(
                    f"`{mode}()` of the model changes its `{entry.names[0]}`, and a bundle has one set of tensors for "
                    "all modes. Export the programs of one mode, with the model in that mode (`model.eval()`, then "
                    "`programs=('infer',)`)"
                )
        modules = dict(module.named_modules())
        left = [f"leaves `{name}` in the other mode" for name in inside if modules[name].training != wanted]
        for name, parameter in module.named_parameters():
            if parameter.requires_grad != trains[name]:
                left.append(f"{'freezes' if trains[name] else 'thaws'} `{name}`")
    if left:
        raise ExportFailed(
            f"`{mode}()` of the model {left[0]}, and that of a loaded bundle would not. Call `.{mode}()` on the model "
            "in the model file, or export the programs of one mode"
        )


def mode_notes(module: nn.Module | None, mode: Mode) -> list[str]:
    """Return a sentence that names the submodules that stay in eval mode in training, or differ in evaluation."""
    children = [] if module is None else list(module.named_modules())
    if mode == "eval":
        encoders = [(name, child) for name, child in children if isinstance(child, nn.TransformerEncoder)]
        padded = listed([f"`{name}`" if name else "the model" for name, child in encoders if child.use_nested_tensor])
        note = (
            f"where `src_key_padding_mask` of {padded} is set, eager gives zeros if gradients are off, and calls do not"
        )
        return [note] if padded else []
    found = [name for name, child in children if name and module is not None and module.training > child.training]
    outermost = [f"`{name}`" for name in found if name.rpartition(".")[0] not in found]
    note = (
        f"in eval mode, as the model has them: {listed(outermost)}; their dropout and batch statistics do "
        "not train. Call `.train()` on the whole model in the model file to train all of it"
    )
    return [note] if outermost else []
