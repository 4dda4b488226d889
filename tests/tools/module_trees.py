"""Random module trees: how they are drawn, built, spelled in a path and read, independently of rlsync."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

Shape = tuple[int, ...]
Step = tuple[str, str, int]  # the kind of the parent, the name of the child, how many children there are
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
OTHERS = (torch.int64, torch.bool, torch.complex64)


@dataclass(frozen=True)
class Make:
    """How one tensor is made."""

    shape: Shape
    dtype: torch.dtype

    def tensor(self, generator: torch.Generator) -> Tensor:
        """Finite numbers, also after a cast."""
        return torch.randint(-50, 50, self.shape, generator=generator).to(self.dtype)


@dataclass(frozen=True)
class Tree:
    """How a module is made: of what kind it is, its own tensors, its children."""

    kind: str = "box"
    parameters: Mapping[str, Make] = field(default_factory=dict)
    buffers: Mapping[str, Make] = field(default_factory=dict)
    state: Mapping[str, Make | int | bool] = field(default_factory=dict)
    children: Mapping[str, Tree] = field(default_factory=dict)

    def build(self, generator: torch.Generator) -> nn.Module:
        children = {name: child.build(generator) for name, child in self.children.items()}
        match self.kind:
            case "sequential":
                return nn.Sequential(*children.values())
            case "list":
                return nn.ModuleList(children.values())
            case "dict":
                return nn.ModuleDict(children)
        box = StatefulBox() if self.state else nn.Module()
        for name, make in self.parameters.items():
            box.register_parameter(name, nn.Parameter(make.tensor(generator), requires_grad=False))
        for number, (name, make) in enumerate(self.buffers.items()):
            box.register_buffer(name, make.tensor(generator), persistent=number % 2 == 0)
        for name, made in self.state.items():
            assert isinstance(box, StatefulBox)
            box.state["deep"][name] = made.tensor(generator) if isinstance(made, Make) else made
        for name, module in children.items():
            box.add_module(name, module)
        return box

    def cast(self, dtype: torch.dtype) -> Tree:
        """The same tree with every floating tensor of one dtype."""

        def as_dtype(makes: Mapping[str, Any]) -> dict[str, Any]:
            floats = {n: isinstance(m, Make) and m.dtype.is_floating_point for n, m in makes.items()}
            return {n: replace(m, dtype=dtype) if floats[n] else m for n, m in makes.items()}

        return replace(
            self,
            parameters=as_dtype(self.parameters),
            buffers=as_dtype(self.buffers),
            state=as_dtype(self.state),
            children={name: child.cast(dtype) for name, child in self.children.items()},
        )

    def paths(self) -> Iterator[list[Step]]:
        """Every module below, itself included."""
        yield []
        for name, child in self.children.items():
            for path in child.paths():
                yield [(self.kind, name, len(self.children)), *path]


class StatefulBox(nn.Module):
    """Holds nested extra state; a tensor in it is replaced, not written to."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, dict[str, Any]] = {"deep": {}}

    def get_extra_state(self) -> dict[str, dict[str, Any]]:
        return self.state

    def set_extra_state(self, state: dict[str, dict[str, Any]]) -> None:
        self.state = state


def spell(step: Step, choice: int) -> str:
    """One way of writing a step of a path."""
    kind, name, count = step
    match kind:
        case "sequential" | "list":
            return (f"[{name}]", f".{name}", f"[{int(name) - count}]")[choice % 3]
        case "dict":
            dotted = f".{name}" if name.isidentifier() or name.isdigit() else f'["{name}"]'
            return (f"['{name}']", dotted, f'["{name}"]')[choice % 3]
    return f".{name}"


def follow(module: nn.Module, path: list[Step]) -> nn.Module:
    for _, name, _ in path:
        child = module._modules[name]
        assert child is not None
        module = child
    return module


@dataclass(frozen=True)
class Seen:
    """One leaf of a live module: its tensor now, and the memory that it is."""

    tensor: Tensor
    memory: object


def leaves_of(module: nn.Module) -> dict[str, Seen]:
    """All leaves by name, as torch and the module itself show them."""
    found: dict[str, Seen] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        found[name] = Seen(tensor, id(tensor))
    for name, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, StatefulBox):
            for key, value in each.state["deep"].items():
                tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                found[f"{name}._extra_state.deep.{key}".removeprefix(".")] = Seen(tensor, (id(each), key))
    return found


def copy_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: seen.tensor.clone() for name, seen in leaves_of(module).items()}


def nudge(module: nn.Module) -> None:
    """Let every leaf have another value."""
    for seen in {seen.memory: seen for seen in leaves_of(module).values()}.values():
        seen.tensor.copy_(~seen.tensor if seen.tensor.dtype is torch.bool else seen.tensor + 1)
    for each in module.modules():
        if isinstance(each, StatefulBox):
            deep = each.state["deep"]
            numbers = {k: v for k, v in deep.items() if not isinstance(v, Tensor)}
            deep.update({k: not v if isinstance(v, bool) else v + 1 for k, v in numbers.items()})


# ---------------------------------------------------------------------------------- drawing

names = st.sampled_from(["a", "b", "net", "w_1", "0"])
shapes = st.lists(st.integers(0, 3), max_size=2).map(tuple)
floats = st.builds(Make, shapes, st.sampled_from(FLOATS))
anything = st.builds(Make, shapes, st.sampled_from(FLOATS + OTHERS))
state = st.dictionaries(names, anything | st.integers(-9, 9) | st.booleans(), max_size=2)


@st.composite
def boxes(draw: st.DrawFn, children: st.SearchStrategy[Tree] | None = None) -> Tree:
    parameters = draw(st.dictionaries(st.sampled_from(["weight", "bias", "scale"]), anything, max_size=2))
    buffers = draw(st.dictionaries(st.sampled_from(["mean", "count", "mask"]), anything, max_size=2))
    extra = draw(st.just({}) | state)
    inner = draw(st.dictionaries(names, children, max_size=2)) if children is not None else {}
    return Tree("box", parameters, buffers, extra, inner)


def _with_children(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    rows = st.lists(children, min_size=1, max_size=3).map(lambda all: {str(i): c for i, c in enumerate(all)})
    keyed = st.dictionaries(st.sampled_from(["left", "with space", "0", "k"]), children, max_size=3)
    return st.one_of(
        boxes(children),
        st.builds(Tree, kind=st.sampled_from(["sequential", "list"]), children=rows),
        st.builds(Tree, kind=st.just("dict"), children=keyed),
    )


trees = st.recursive(boxes(), _with_children, max_leaves=5)


@st.composite
def damaged(draw: st.DrawFn, tree: Tree) -> Tree:
    """The tree with one leaf missing, extra, renamed, of another shape or of another dtype."""
    if tree.children and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(tree.children)))
        return replace(tree, children={**tree.children, name: draw(damaged(tree.children[name]))})
    if tree.kind != "box":
        return tree
    store = draw(st.sampled_from(["parameters", "buffers"]))
    makes = dict(tree.parameters if store == "parameters" else tree.buffers)
    how = draw(st.sampled_from(["missing", "extra", "renamed", "shape", "broadcast", "broadcast", "dtype"]))
    if how == "extra" or not makes:
        makes["surplus"] = draw(anything)
    else:
        name = draw(st.sampled_from(sorted(makes)))
        make = makes.pop(name)
        match how:
            case "renamed":
                makes[name + "_"] = make
            case "shape":
                makes[name] = replace(make, shape=draw(shapes))
            case "broadcast":
                makes[name] = replace(make, shape=tuple(1 for _ in make.shape) or (1,))
            case "dtype":
                makes[name] = replace(make, dtype=draw(st.sampled_from(FLOATS + OTHERS)))
    return replace(tree, **{store: makes})


def tie(module: nn.Module, pairs: list[tuple[int, int]]) -> None:
    """Make pairs of equal shape, dtype and kind the same memory."""
    for which in ("_parameters", "_buffers"):
        slots = [
            (store, name) for each in module.modules() for store in (vars(each)[which],) for name in store
        ]
        for one, other in pairs:
            if not slots:
                continue
            (a, m), (b, n) = slots[one % len(slots)], slots[other % len(slots)]
            if a[m].shape == b[n].shape and a[m].dtype == b[n].dtype and a[m].numel():
                b[n] = a[m]
