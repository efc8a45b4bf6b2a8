"""A model cut in two where its modules run one after the other: what comes before a module, and from there on."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch.fx
from torch import nn

from metricopt_ext.errors import AdapterError
from metricopt_ext.utils.modes import evaluating
from metricopt_ext.utils.words import brief, nearest, shortened

Kind = Literal["input", "module", "function", "method", "attribute", "output"]
KINDS: Mapping[str, Kind] = {
    "placeholder": "input",
    "call_module": "module",
    "call_function": "function",
    "call_method": "method",
    "get_attr": "attribute",
    "output": "output",
}


class Value(NamedTuple):
    """Stands for what a step gave.

    Attributes:
        name: The step's name.
    """

    name: str


class Step(NamedTuple):
    """A step of a forward pass.

    Attributes:
        kind: What is done.
        name: What its result is called.
        target: The module's, method's or attribute's name, or the function.
        args: Its arguments, with a `Value` for each result of another step.
        kwargs: Its named ones.
        inputs: Names of the steps whose results it needs.
    """

    kind: Kind
    name: str
    target: Any
    args: Any
    kwargs: Any
    inputs: tuple[str, ...]


class Cut(NamedTuple):
    """A forward pass in two parts.

    Attributes:
        given: The input's name.
        kept: What the first part gives, and all that the second needs.
        before: The first part's steps.
        after: The second's.
    """

    given: str
    kept: str
    before: tuple[Step, ...]
    after: tuple[Step, ...]


def cut_at(model: nn.Module, first: str) -> Cut:
    """Cut a model's forward pass at the first call of a module.

    Args:
        model: Any whose forward pass on one input can be traced by ``torch.fx``, as it is in evaluation mode.
        first: Name of a module in it.

    Raises:
        AdapterError: There is no such module, its forward pass can't be traced or does not come to the module, the
            module is called on the model's own input, it needs a further argument that has no default, or what follows
            needs more than the module's input.
    """
    steps = _steps(model, first)
    calls = [step for step in steps if step.kind == "module" and step.target == first]
    if not calls:
        raise AdapterError(f"{type(model).__name__} does not call {first!r}")
    given = next(step.name for step in steps if step.kind == "input")
    if not calls[0].inputs:
        raise AdapterError(f"{first!r} is called without an input")
    kept = calls[0].inputs[0]
    if kept == given:
        raise AdapterError(f"{first!r} is called on the model's own input, so there is nothing before it")
    known = {step.name: step for step in steps}
    earlier = _behind(kept, known)
    before = tuple(step for step in steps if step.name in earlier)
    if lacking := [step.name for step in before if step.kind == "input" and step.name != given and not step.args]:
        raise AdapterError(f"{first!r} needs {shortened(lacking)} besides the model's first input")
    after = tuple(step for step in steps if step.name not in earlier and step.kind != "input")
    needed = {name for step in after for name in step.inputs} - {step.name for step in after} - {kept}
    if needed:
        raise AdapterError(
            f"what follows {first!r} needs more than its input: {shortened(sorted(needed))}, so its modules do not run"
            " one after the other there"
        )
    return Cut(given, kept, before, after)


def modules_of(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the names of the modules that steps call."""
    return tuple(dict.fromkeys(step.target for step in steps if step.kind == "module"))


def attributes_of(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the names of the parameters and buffers that steps use by themselves."""
    return tuple(dict.fromkeys(step.target for step in steps if step.kind == "attribute"))


def run(model: nn.Module, steps: Sequence[Step], given: str, value: Any, wanted: str | None = None) -> Any:
    """Run steps.

    Args:
        model: Has the modules.
        steps: The steps, in their order.
        given: What they begin from: its name.
        value: The value itself.
        wanted: The name of what is returned; None for the model's output.
    """
    results, last = {given: value}, dict[str, int]()
    for at, step in enumerate(steps):
        last |= dict.fromkeys(step.inputs, at)
    for at, step in enumerate(steps):
        if step.name not in results:
            args, kwargs = _filled(step.args, results), _filled(step.kwargs, results)
            results[step.name] = _done(model, step, args, kwargs)
        for name in step.inputs:
            if last[name] == at and name != wanted:
                results.pop(name, None)
    return results[steps[-1].name if wanted is None else wanted]


def _steps(model: nn.Module, first: str) -> list[Step]:
    """Trace a model as steps, each module as one that does not hold the one that is looked for."""

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return not first.startswith(f"{name}.")

    names = [name for name, _ in model.named_modules() if name]
    if first not in names:
        raise AdapterError(f"{first!r} is no module of the model{nearest(first, names)}")
    try:
        with evaluating(model):
            graph = Tracer().trace(model)
    except Exception as error:  # of the model's own code, which meets what stands for its inputs
        raise AdapterError(
            f"{type(model).__name__} can't be cut at {first!r}: torch.fx can't trace its forward pass ({brief(error)})"
        ) from error
    return [
        Step(
            KINDS[node.op],
            node.name,
            node.target,
            torch.fx.node.map_arg(node.args, lambda each: Value(each.name)),
            torch.fx.node.map_arg(node.kwargs, lambda each: Value(each.name)),
            tuple(each.name for each in node.all_input_nodes),
        )
        for node in graph.nodes
    ]


def _behind(name: str, known: Mapping[str, Step]) -> set[str]:
    """Return the steps that a result depends on, its own included."""
    found, left = set[str](), [name]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += known[each].inputs
    return found


def _done(model: nn.Module, step: Step, args: Any, kwargs: Any) -> Any:
    if step.kind == "module":
        return model.get_submodule(step.target)(*args, **kwargs)
    if step.kind == "function":
        return step.target(*args, **kwargs)
    if step.kind == "method":
        return getattr(args[0], step.target)(*args[1:], **kwargs)
    if step.kind == "attribute":
        owner, _, name = step.target.rpartition(".")
        return getattr(model.get_submodule(owner), name)
    return args[0]  # the output, or the default of another argument


def _filled(arguments: Any, results: Mapping[str, Any]) -> Any:
    """Return arguments with results in place of what stands for them."""
    if isinstance(arguments, Value):
        return results[arguments.name]
    if isinstance(arguments, slice):
        return slice(*(_filled(each, results) for each in (arguments.start, arguments.stop, arguments.step)))
    if isinstance(arguments, Mapping):
        return {key: _filled(each, results) for key, each in arguments.items()}
    if isinstance(arguments, (tuple, list)):  # torch.fx makes one with names by a step of its own
        filled = (_filled(each, results) for each in arguments)
        return tuple(filled) if isinstance(arguments, tuple) else list(filled)
    return arguments
